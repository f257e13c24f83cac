#include "comm/launch/subprocess.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

constexpr int kExecFailed = 127;

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

// Between fork and exec. Other threads may have held any lock at the fork, so
// only async-signal-safe calls are allowed here.
[[noreturn]] void ExecInChild(pid_t parent, char** argv, char** envp,
                              const std::vector<std::pair<int, int>>& fds) {
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
      _exit(kExecFailed);
    }
  }
  execve("/proc/self/exe", argv, envp);
  _exit(kExecFailed);
}

}  // namespace

absl::StatusOr<pid_t> SpawnSelf(const SelfExecOptions& options) {
  const std::vector<std::string> environment = MergedEnvironment(options.env);
  const std::vector<char*> argv = Pointers(options.argv);
  const std::vector<char*> envp = Pointers(environment);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot start a process: ", strerror(errno)));
  }
  if (child == 0) {
    ExecInChild(parent, const_cast<char**>(argv.data()),
                const_cast<char**>(envp.data()), options.fds);
  }
  return child;
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
