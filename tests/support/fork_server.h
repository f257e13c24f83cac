// Starts this test program again, as ranks or as programs that it watches: as
// forks of one process that has loaded libtorch. Loading it costs a process
// that is started by exec 0.3 s of processor time. The server is itself a fork
// of the test process, made as main() begins.
//
//   test process --fork--> server (one thread) --fork--> child
//                                              --fork--> child ...
//
// A child is one of the test process, which becomes the reaper of orphans: the
// server forks twice, and the process in between ends at once. So waitpid, and
// death with the test process, work as after exec. What differs: children have
// the same addresses, so an order that depends on addresses is the same in all
// of them; and they have what the process had as main() began (processors,
// limits, signals), except environment and descriptors. What --world starts is
// started by exec in tests, too.
//
// Threads: calls come from one thread, the one that lives to the end.
#ifndef TESTS_SUPPORT_FORK_SERVER_H_
#define TESTS_SUPPORT_FORK_SERVER_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/launch/subprocess.h"

namespace tessera {

using Environment = std::vector<std::pair<std::string, std::string>>;

// Does what SpawnSelf does, by a fork where ServeForks has been called. Without
// an argv the child has this process's own. At most four descriptors. Returns
// Unavailable.
absl::StatusOr<pid_t> ForkSelf(const SelfExecOptions& options);

// Starts the server, before main() does anything else. It returns in the test
// process, and in each child, which finds in its environment and its arguments
// what it is to do. Where the variable `mark` is set, this process was started
// by exec, to be no test: nothing is done.
//
// OMP_NUM_THREADS is read by a library as it is loaded: where it is not
// `threads` (null: not set), the program first executes itself anew with it.
// .bazelrc sets it to 1.
void ServeForks(const char* mark, int* argc, char*** argv,
                const char* threads = "1");

// Returns this process's own arguments.
std::vector<std::string> OwnArgv();

}  // namespace tessera
#endif  // TESTS_SUPPORT_FORK_SERVER_H_
