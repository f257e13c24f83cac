#include "comm/rendezvous/store_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

class StoreFileTest : public testing::Test {
 protected:
  StoreFileTest() : folder_(testing::TempDir() + "/storeXXXXXX") {
    if (mkdtemp(folder_.data()) == nullptr) abort();
    path_ = folder_ + "/meet";
  }
  ~StoreFileTest() override {
    unlink(path_.c_str());
    rmdir(path_.c_str());
    unlink((folder_ + "/other").c_str());
    rmdir(folder_.c_str());
  }
  void Make(mode_t mode) {
    std::ofstream(path_) << "text";
    chmod(path_.c_str(), mode);
  }
  int Mode() const {
    struct stat file = {};
    return lstat(path_.c_str(), &file) == 0 ? file.st_mode & 07777 : -1;
  }
  void ExpectRefused(const std::string& words) {
    EXPECT_THAT(ClaimStoreFile(path_),
                StatusIs(StatusCode::kPermissionDenied, HasSubstr(words)));
  }

  std::string folder_, path_;
};

TEST_F(StoreFileTest, IsMadeForItsUserAlone) {
  const mode_t before = umask(0);
  EXPECT_TRUE(ClaimStoreFile(path_).ok());
  umask(before);
  EXPECT_EQ(Mode(), 0600);
  EXPECT_TRUE(ClaimStoreFile(path_).ok());  // the next rank
}

TEST_F(StoreFileTest, RefusesWhatOthersMayOpen) {
  for (mode_t mode : {0644, 0620, 0606}) {
    Make(mode);
    ExpectRefused("other users may open it (mode 06");
    EXPECT_EQ(Mode(), mode);
  }
}

TEST_F(StoreFileTest, RefusesLinks) {
  const std::string other = folder_ + "/other";
  ASSERT_EQ(symlink(other.c_str(), path_.c_str()), 0);
  ExpectRefused("it is a symbolic link");
  EXPECT_NE(access(other.c_str(), F_OK), 0);  // and is not followed
}

TEST_F(StoreFileTest, RefusesWhatIsNoFile) {
  ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
  ExpectRefused("it is no plain file");
  rmdir(path_.c_str());
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  ExpectRefused("it is no plain file");
}

TEST_F(StoreFileTest, RefusesAnotherUsers) {
  Make(0600);
  if (chown(path_.c_str(), 12345, 12345) != 0) GTEST_SKIP() << "needs root";
  ExpectRefused("it belongs to user 12345, this process to user 0");
}

TEST_F(StoreFileTest, AFolderThatIsNotThere) {
  EXPECT_THAT(ClaimStoreFile(folder_ + "/no/meet"),
              StatusIs(StatusCode::kUnavailable,
                       HasSubstr("cannot write to folder " + folder_ +
                                 "/no: No such file or directory")));
}

}  // namespace
}  // namespace tessera
