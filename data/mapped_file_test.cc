#include "data/mapped_file.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(MappedFile, HoldsTheBytes) {
  const std::string content("a\0\xFFz", 4);
  const std::string path = WriteTestFile("f", content);
  TESSERA_ASSERT_OK_AND_ASSIGN(const MappedFile file, MappedFile::Open(path));
  EXPECT_EQ(file.path(), path);
  EXPECT_THAT(file.bytes(), ElementsAre('a', 0, 0xFF, 'z'));
}

TEST(MappedFile, MissingFileIsNotFound) {
  EXPECT_THAT(MappedFile::Open("/nowhere/text"),
              StatusIs(StatusCode::kNotFound,
                       "/nowhere/text: No such file or directory"));
}

TEST(MappedFile, EmptyAndShortFilesAreRefused) {
  const std::string empty = WriteTestFile("f", "");
  EXPECT_THAT(MappedFile::Open(empty),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(empty,
                                    ": expected at least 1 bytes, the "
                                    "file has 0")));
  EXPECT_THAT(MappedFile::Open(empty, 0),
              StatusIs(StatusCode::kInvalidArgument));
  const std::string path = WriteTestFile("f", "12345");
  TESSERA_EXPECT_OK(MappedFile::Open(path, 5));
  EXPECT_THAT(MappedFile::Open(path, 6),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(path,
                                    ": expected at least 6 bytes, the "
                                    "file has 5")));
}

TEST(MappedFile, FoldersAndPipesAreRefused) {
  EXPECT_THAT(
      MappedFile::Open(::testing::TempDir()),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  // Opening a pipe without a writer must not wait for one either.
  const std::string pipe = absl::StrCat(::testing::TempDir(), "pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(
      MappedFile::Open(pipe),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  unlink(pipe.c_str());
}

TEST(MappedFile, MovesKeepTheMapping) {
  TESSERA_ASSERT_OK_AND_ASSIGN(MappedFile a,
                               MappedFile::Open(WriteTestFile("f", "ab")));
  const uint8_t* data = a.bytes().data();
  MappedFile b = std::move(a);
  EXPECT_EQ(b.bytes().data(), data);
  EXPECT_THAT(a.bytes(), IsEmpty());  // NOLINT(bugprone-use-after-move)
  TESSERA_ASSERT_OK_AND_ASSIGN(MappedFile c,
                               MappedFile::Open(WriteTestFile("g", "xyz")));
  c = std::move(b);
  EXPECT_THAT(c.bytes(), SizeIs(2));
  MappedFile& same = c;
  c = std::move(same);
  EXPECT_EQ(c.bytes().data(), data);
}

TEST(MappedFileDeathTest, ATruncatedFileIsNamed) {
  const std::string path = WriteTestFile("f", std::string(3 * 4096, 'x'));
  TESSERA_ASSERT_OK_AND_ASSIGN(const MappedFile file, MappedFile::Open(path));
  ASSERT_EQ(truncate(path.c_str(), 100), 0);
  EXPECT_EQ(file.bytes()[99], 'x');
  EXPECT_EXIT(
      {
        volatile uint8_t byte = file.bytes()[2 * 4096];
        (void)byte;
      },
      testing::KilledBySignal(SIGBUS),
      path + ": the file was truncated while this process read it");
}

}  // namespace
}  // namespace tessera
