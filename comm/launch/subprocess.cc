#include "comm/launch/subprocess.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/system/system_limits.h"

namespace tessera {
namespace {

constexpr int kExecFailed = 127;
constexpr char kSelf[] = "/proc/self/exe";

std::vector<std::string> MergedEnvironment(
    const std::vector<std::pair<std::string, std::string>>& changes) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool changed = false;
    for (const auto& change : changes) {
      changed |= absl::StartsWith(*entry, absl::StrCat(change.first, "="));
    }
    if (!changed) merged.emplace_back(*entry);
  }
  std::map<std::string, std::string> last;  // of those with the same name
  for (const auto& change : changes) last[change.first] = change.second;
  for (const auto& change : last) {
    merged.push_back(absl::StrCat(change.first, "=", change.second));
  }
  return merged;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& s : strings) {
    pointers.push_back(const_cast<char*>(s.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

[[noreturn]] void Report(int fd) {
  const int error = errno;
  if (write(fd, &error, sizeof(error)) < 0) errno = error;
  _exit(kExecFailed);
}

// Between fork and exec. Other threads may have held any lock at the fork, so
// only async-signal-safe calls are allowed here.
// What fails is written to `report`, as errno.
[[noreturn]] void ExecInChild(pid_t parent, char** argv, char** envp,
                              const std::vector<std::pair<int, int>>& fds,
                              int report) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);  // it died before the prctl
  struct sigaction act;
  memset(&act, 0, sizeof(act));
  act.sa_handler = SIG_DFL;
  for (int sig : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGPIPE}) {
    if (sig == SIGCHLD || !IsIgnored(sig)) sigaction(sig, &act, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const auto& fd : fds) {
    if (fd.first == fd.second) {
      fcntl(fd.first, F_SETFD, 0);  // dup2 would leave close-on-exec set
    } else if (dup2(fd.first, fd.second) < 0) {
      Report(report);
    }
  }
  execve(kSelf, argv, envp);
  Report(report);
}

// A pipe whose writing end no descriptor that the child is given takes.
bool OpenReport(const SelfExecOptions& options, int ends[2]) {
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  int above = 0;
  for (const auto& fd : options.fds) above = std::max(above, fd.second + 1);
  const int moved = fcntl(ends[1], F_DUPFD_CLOEXEC, above);
  const int error = errno;
  close(ends[1]);
  ends[1] = moved;
  if (moved < 0) close(ends[0]);
  errno = error;
  return moved >= 0;
}

absl::Status CannotStart(int error) {
  absl::Status status = absl::UnavailableError(
      absl::StrCat("cannot start a process: ", strerror(error)));
  if (error == EMFILE || error == ENFILE) {
    return absl::ResourceExhaustedError(
        absl::StrCat(status.message(), DescriptorLimit(error)));
  }
  if (error == ENOENT && access(kSelf, F_OK) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot start this program again: ", kSelf,
        " is not there; mount /proc (mount -t proc proc /proc), or start the "
        "ranks by torchrun, srun or mpirun"));
  }
  return status;
}

}  // namespace

absl::StatusOr<pid_t> SpawnSelf(const SelfExecOptions& options) {
  const std::vector<std::string> environment = MergedEnvironment(options.env);
  const std::vector<char*> argv = Pointers(options.argv);
  const std::vector<char*> envp = Pointers(environment);
  const pid_t parent = getpid();
  int report[2];
  if (!OpenReport(options, report)) return CannotStart(errno);
  const pid_t child = fork();
  const int fork_error = errno;
  if (child == 0) {
    ExecInChild(parent, const_cast<char**>(argv.data()),
                const_cast<char**>(envp.data()), options.fds, report[1]);
  }
  close(report[1]);
  int error = 0;
  // Nothing comes of a program that runs.
  const ssize_t got =
      child < 0 ? 0
                : TEMP_FAILURE_RETRY(read(report[0], &error, sizeof(error)));
  close(report[0]);
  if (child < 0) return CannotStart(fork_error);
  if (got != sizeof(error)) return child;
  waitpid(child, nullptr, 0);
  return CannotStart(error);
}

bool IsIgnored(int sig) {
  struct sigaction act;
  return sigaction(sig, nullptr, &act) == 0 && act.sa_handler == SIG_IGN;
}

std::string DescribeExit(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int sig = WTERMSIG(wait_status);
    return absl::StrCat("was ended by signal ", sig, " (", strsignal(sig), ")");
  }
  return absl::StrCat("ended (exit code ", WEXITSTATUS(wait_status), ")");
}

int ShellExitCode(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status)
                                  : WEXITSTATUS(wait_status);
}

}  // namespace tessera
