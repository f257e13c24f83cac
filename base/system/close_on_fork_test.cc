#include "base/system/close_on_fork.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Returns the result of `child` in a forked child.
int InChild(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool IsNull(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 && S_ISCHR(info.st_mode) &&
         info.st_rdev == makedev(1, 3) &&
         (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
}

bool IsSocket(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode);
}

int NewSocket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

TEST(CloseOnForkTest, AChildHasNothingOfIt) {
  const int ours = OpenCloseOnFork(NewSocket);
  const int other = NewSocket();
  const int later = NewSocket();
  SetCloseOnFork(later);
  EXPECT_TRUE(IsCloseOnFork(ours));
  EXPECT_FALSE(IsCloseOnFork(other));
  EXPECT_EQ(InChild([&] {
              return IsNull(ours) && IsNull(later) && IsSocket(other) ? 7 : 0;
            }),
            7);
  // A child of the child, which has files of its own there by now.
  EXPECT_EQ(InChild([&] {
              dup2(other, ours);
              return InChild([&] { return IsSocket(ours) ? 7 : 0; });
            }),
            7);
  EXPECT_TRUE(IsSocket(ours) && IsSocket(later));
  for (int fd : {ours, other, later}) EXPECT_EQ(CloseDescriptor(fd), 0);
  EXPECT_FALSE(IsCloseOnFork(ours));
}

// Whoever closed it did not say so: the number is another file's.
TEST(CloseOnForkTest, AFileThatHasItsNumberStays) {
  const int ours = OpenCloseOnFork(NewSocket);
  close(ours);
  const int users = NewSocket();
  ASSERT_EQ(users, ours);
  EXPECT_EQ(InChild([&] { return IsSocket(users) ? 7 : 0; }), 7);
  CloseDescriptor(users);
}

TEST(CloseOnForkTest, ErrorsAndErrnoArePassedOn) {
  EXPECT_EQ(OpenCloseOnFork([] { return open("/nowhere/at/all", O_RDONLY); }),
            -1);
  EXPECT_EQ(errno, ENOENT);
  EXPECT_EQ(CloseDescriptor(-1), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(CloseOnForkTest, NoneSlipsThroughWhileThreadsOpen) {
  std::atomic<bool> stop{false};
  std::thread opener([&] {
    while (!stop) {
      const int fd = OpenCloseOnFork(NewSocket);
      CloseDescriptor(fd);
    }
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(InChild([] {
                for (int fd = 3; fd < 64; ++fd) {
                  if (IsSocket(fd)) return 1;
                }
                return 0;
              }),
              0);
  }
  stop = true;
  opener.join();
}

// Other code writes to the standard descriptors.
TEST(CloseOnForkTest, NeverAStandardDescriptor) {
  EXPECT_EQ(InChild([] {
              for (int fd : {0, 1, 2}) close(fd);
              const int fd = OpenCloseOnFork(NewSocket);
              return fd > 2 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 &&
                             fcntl(1, F_GETFD) < 0
                         ? 7
                         : 0;
            }),
            7);
}

}  // namespace
}  // namespace tessera
