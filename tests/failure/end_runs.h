// Runs of a small program of two ranks, for end_test.cc: whether they end, and
// where their threads are if they do not.
#ifndef TESTS_FAILURE_END_RUNS_H_
#define TESTS_FAILURE_END_RUNS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "comm/rendezvous/hosted_store.h"

namespace tessera {

// Set in the environment of a program that is to be a rank: its Ending.
inline constexpr char kEndingVariable[] = "TESSERA_END_TEST_ENDING";

// How a rank leaves.
enum class Ending { kClosed, kDestroyed, kWithoutShutdown, kByExit };
inline constexpr int kEndings = 4;
std::string NameOf(Ending ending);

// One run of the program.
class EndRun {
 public:
  // `by_launcher`: by exec, as --world=2 does it; otherwise two forks, with
  // this process as their launcher.
  EndRun(Ending ending, bool by_launcher);
  // Kills what is left of it.
  ~EndRun();
  EndRun(const EndRun&) = delete;
  EndRun& operator=(const EndRun&) = delete;

  // True once all of its processes have ended.
  bool HasEnded();
  // True if its threads have neither run nor waited for a processor for
  // `limit`: it is not just slow.
  bool Hangs(absl::Duration limit);
  // Its processes and theirs: of each thread its state, where it waits in the
  // kernel, and, where gdb is, its stack.
  std::string Stacks() const;
  // "" if it ended well, else what it wrote. REQUIRES: HasEnded().
  std::string Fault();
  std::string ToText() const;

 private:
  struct Child {
    pid_t pid = 0;  // 0: has ended
    int output = -1;
    int wait_status = 0;
  };
  void StartForks();
  void StartLauncher();

  const Ending ending_;
  const bool by_launcher_;
  absl::Time looked_ = absl::Now();  // last
  absl::Duration wanted_then_;
  std::optional<HostedStore> store_;
  std::vector<Child> children_;
};

}  // namespace tessera
#endif  // TESTS_FAILURE_END_RUNS_H_
