// Where a job's secret comes from, and whose connections are whose.
#include "comm/connect/job_secret.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "comm/connect/keyed_hash.h"
#include "comm/connect/peer_user.h"
#include "comm/connect/reception.h"
#include "comm/connect/sockets.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr char kSecret[] = "0123456789abcdef";

class JobSecretTest : public testing::Test {
 protected:
  JobSecretTest() { Unset(); }
  ~JobSecretTest() override {
    Unset();
    unlink(path_.c_str());
  }
  static void Unset() {
    unsetenv(kJobSecretVariable);
    unsetenv(kJobSecretFileVariable);
  }
  void Write(const std::string& text, mode_t mode) {
    std::ofstream(path_) << text;
    chmod(path_.c_str(), mode);
    setenv(kJobSecretFileVariable, path_.c_str(), 1);
  }
  const std::string path_ =
      absl::StrCat(testing::TempDir(), "/secret.", getpid());
};

TEST_F(JobSecretTest, ComesFromTheEnvironmentOrAFile) {
  EXPECT_EQ(FindJobSecret().value(), "");
  Write(absl::StrCat(kSecret, "\n"), 0600);
  EXPECT_EQ(FindJobSecret().value(), kSecret);
  setenv(kJobSecretVariable, kSecret, 1);
  EXPECT_THAT(FindJobSecret().status().message(),
              HasSubstr("both TESSERA_JOB_SECRET and TESSERA_JOB_SECRET_FILE"));
  unsetenv(kJobSecretFileVariable);
  EXPECT_EQ(FindJobSecret().value(), kSecret);
}

TEST_F(JobSecretTest, WhatOthersMayReadOrIsTooShortIsRefused) {
  Write(kSecret, 0640);
  EXPECT_EQ(FindJobSecret().status().code(),
            absl::StatusCode::kPermissionDenied);
  Write("short", 0600);
  EXPECT_EQ(FindJobSecret().status().code(),
            absl::StatusCode::kInvalidArgument);
  Write(std::string(5000, 'x'), 0600);
  EXPECT_EQ(FindJobSecret().status().code(),
            absl::StatusCode::kInvalidArgument);
  unlink(path_.c_str());
  EXPECT_EQ(FindJobSecret().status().code(), absl::StatusCode::kUnavailable);
  Unset();
  setenv(kJobSecretVariable, "short", 1);
  EXPECT_THAT(FindJobSecret().status().message(),
              testing::AllOf(HasSubstr("16 characters"),
                             testing::Not(HasSubstr("short"))));
}

TEST_F(JobSecretTest, KeysDifferBySecretPurposeAndWords) {
  const std::string key = KeyOfSecret("secret", "store", "a");
  EXPECT_EQ(key.size(), kHashBytes);
  EXPECT_EQ(KeyOfSecret("secret", "store", "a"), key);
  EXPECT_NE(KeyOfSecret("secret2", "store", "a"), key);
  EXPECT_NE(KeyOfSecret("secret", "stor", "ea"), key);
  EXPECT_NE(KeyOfSecret("secret", "store", "b"), key);
  EXPECT_NE(NewJobSecret(), NewJobSecret());
  EXPECT_TRUE(SameHash(key, key));
  EXPECT_FALSE(SameHash(key, key.substr(1)));
}

// Connects with `port` in a process of user `uid`, which waits for a byte.
pid_t ConnectAsUser(uid_t uid, uint16_t port) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  if (setuid(uid) != 0) _exit(1);
  const int fd = ConnectTo("127.0.0.1", absl::StrCat(port));
  if (fd < 0) _exit(2);
  _exit(WaitForSocket(fd, POLLIN, 20000) ? 0 : 3);
}

// Whether a Reception of a job without a secret keeps the next connection of
// user `uid`.
bool IsKept(int listener, uint16_t port, uid_t uid) {
  const pid_t pid = ConnectAsUser(uid, port);
  EXPECT_TRUE(WaitForSocket(listener, POLLIN, 20000));
  bool kept = false;
  {
    Reception::Options options;
    options.world_size = 2;
    Reception reception(listener, options);
    std::vector<pollfd> fds;
    reception.AddTo(&fds);
    poll(fds.data(), fds.size(), 0);
    EXPECT_THAT(reception.Look(fds.data()), testing::IsEmpty());
    fds.clear();
    reception.AddTo(&fds);
    kept = fds.size() == 2;
  }
  waitpid(pid, nullptr, 0);
  return kept;
}

TEST(PeerUserTest, TheKernelTellsWhoseConnectionItIs) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  uint16_t port = 0;
  const int listener = OpenListener(/*loopback=*/true, 4, &port);
  ASSERT_GE(listener, 0);
  for (uid_t uid : {uid_t{0}, uid_t{65534}}) {
    const pid_t pid = ConnectAsUser(uid, port);
    ASSERT_TRUE(WaitForSocket(listener, POLLIN, 20000));
    const int fd = accept(listener, nullptr, nullptr);
    ASSERT_GE(fd, 0);
    EXPECT_EQ(PeerUser(fd), uid);
    EXPECT_EQ(OfAnotherUser(fd), uid != 0);
    ASSERT_EQ(send(fd, "x", 1, MSG_NOSIGNAL), 1);
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
    close(fd);
    EXPECT_EQ(IsKept(listener, port, uid), uid == 0);
  }
  close(listener);
}

}  // namespace
}  // namespace tessera
