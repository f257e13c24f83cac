#include "base/system/process_defaults.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "gtest/gtest.h"

namespace tessera {
namespace {

int InChild(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(ProcessDefaultsTest, ClosedStandardDescriptorsAreOpened) {
  for (int closed = 0; closed < 8; ++closed) {
    EXPECT_EQ(InChild([&] {
                for (int fd : {0, 1, 2}) {
                  if ((closed >> fd & 1) != 0) close(fd);
                }
                errno = 77;
                OpenStandardDescriptors();
                if (errno != 77) return 1;
                for (int fd : {0, 1, 2}) {
                  struct stat info;
                  if (fstat(fd, &info) != 0) return 2;
                  // Programs that are executed have them, too.
                  if ((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0) return 3;
                  const bool is_new = (closed >> fd & 1) != 0;
                  if (is_new && write(fd, "x", 1) != 1) return 4;
                }
                const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
                return next > 2 ? 7 : 5;
              }),
              7)
        << closed;
  }
}

TEST(ProcessDefaultsTest, WhatIsOpenStaysAsItIs) {
  EXPECT_EQ(InChild([] {
              close(1);
              if (open("/dev/null", O_RDONLY) != 1) return 1;
              OpenStandardDescriptors();
              return write(1, "x", 1) < 0 && errno == EBADF ? 7 : 2;
            }),
            7);
}

TEST(ProcessDefaultsTest, SignalsThatEndNobody) {
  EXPECT_EQ(InChild([] {
              signal(SIGPIPE, SIG_DFL);
              signal(SIGUSR1, SIG_DFL);
              int ends[2], err[2];
              if (pipe(ends) != 0 || pipe(err) != 0) return 1;
              close(ends[0]);
              SurviveSignals();
              if (write(ends[1], "x", 1) >= 0 || errno != EPIPE) return 2;
              dup2(err[1], 2);
              raise(SIGUSR1);
              char text[100] = {};
              if (read(err[0], text, sizeof(text) - 1) <= 0) return 3;
              struct sigaction now;
              sigaction(SIGUSR1, nullptr, &now);
              if (!IsSurvived(now)) return 4;
              // A program that is executed handles the signal as before.
              const int status = std::system("kill -PIPE $$");
              return WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE &&
                             std::string(text).find(
                                 "SIGUSR1: no "
                                 "CheckpointManager") != std::string::npos
                         ? 7
                         : 5;
            }),
            7);
}

// The program's own word stands.
TEST(ProcessDefaultsTest, HandlersOfTheProgramStay) {
  EXPECT_EQ(InChild([] {
              signal(SIGUSR1, [](int) { _exit(7); });
              signal(SIGPIPE, SIG_IGN);
              SurviveSignals();
              struct sigaction pipe;
              sigaction(SIGPIPE, nullptr, &pipe);
              if (pipe.sa_handler != SIG_IGN) return 1;
              raise(SIGUSR1);
              return 2;
            }),
            7);
}

}  // namespace
}  // namespace tessera
