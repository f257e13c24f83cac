// ForkServer starts ranks as forks of one process that has loaded libtorch.
// Loading it costs a rank that is started by exec 0.4 s of processor time.
//
//   test process --exec--> server (one thread) --fork--> rank
//                                              --fork--> rank ...
//
// A rank is a child of the test process, which becomes the reaper of orphans:
// the server forks twice, and the process in between ends at once. So waitpid,
// and death with the test process, work as for a rank that was started by exec.
// One thing differs: ranks have the same addresses, so an order that depends on
// addresses is the same on all of them. Tests of launching and of killed ranks
// use exec.
//
// Threads: calls come from one thread, the one that lives to the end.
#ifndef TESTS_SUPPORT_FORK_SERVER_H_
#define TESTS_SUPPORT_FORK_SERVER_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

using Environment = std::vector<std::pair<std::string, std::string>>;

class ForkServer {
 public:
  // Returns the process's server, which the first call starts: this program
  // again, whose main() must begin with ServeForks. Its ranks have
  // `OMP_NUM_THREADS` 1. Returns Unavailable.
  static absl::StatusOr<ForkServer*> Get();

  // Starts a rank with `env` set and with these two descriptors as its ends.
  // Returns Unavailable.
  absl::StatusOr<pid_t> Fork(const Environment& env, int stderr_fd,
                             int socket_fd);

  // The descriptor of a rank's socket.
  static constexpr int kSocket = 3;

 private:
  explicit ForkServer(int socket) : socket_(socket) {}
  static absl::StatusOr<ForkServer*> Start();

  const int socket_;
};

// In the server, serves until the test process ends, and returns in each rank.
// Elsewhere it returns at once.
void ServeForks();

// Returns this process's own arguments.
std::vector<std::string> OwnArgv();

}  // namespace tessera
#endif  // TESTS_SUPPORT_FORK_SERVER_H_
