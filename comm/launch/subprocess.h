// Subprocesses that run this program again, and words for how they end.
//
// A child dies with its parent: the kernel sends it SIGKILL when the thread
// that started it ends. So start children from a thread that lives as long as
// they are wanted.
#ifndef COMM_LAUNCH_SUBPROCESS_H_
#define COMM_LAUNCH_SUBPROCESS_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

struct SelfExecOptions {
  std::vector<std::string> argv;  // argv[0] included
  // Set over (or added to) this process's environment; the last one of a name
  // counts.
  std::vector<std::pair<std::string, std::string>> env;
  // The child's number for each of this process's descriptors. Others reach
  // the child unless they are close-on-exec.
  std::vector<std::pair<int, int>> fds;  // {ours, the child's}
};

// Runs /proc/self/exe. Signals do there what they do by default; those that
// this process ignores stay ignored (except SIGCHLD, which whoever waits for
// processes needs). LOCAL; any thread. Returns Unavailable if the system
// refuses.
absl::StatusOr<pid_t> SpawnSelf(const SelfExecOptions& options);

// Whether this process ignores `sig`. Async-signal-safe.
bool IsIgnored(int sig);

// Describes a status of waitpid(): "ended (exit code 3)", "was ended by signal
// 9 (Killed)".
std::string DescribeExit(int wait_status);
// Returns a shell's exit code for it: the exit code, or 128 + signal.
int ShellExitCode(int wait_status);

}  // namespace tessera
#endif  // COMM_LAUNCH_SUBPROCESS_H_
