// Runs one start-up of a few ranks in which one of them is disturbed, for
// startup_seeds_test.cc; records when each ended, and what it printed.
#ifndef TESTS_LAUNCH_STARTUP_RUN_H_
#define TESTS_LAUNCH_STARTUP_RUN_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "tests/launch/two_hosts.h"

namespace tessera {

// Set in the environment of a program that becomes a rank, or the ranks'
// launcher.
inline constexpr char kRankVariable[] = "TESSERA_STARTUP_SEEDS_RANK";
inline constexpr char kArgsVariable[] = "TESSERA_STARTUP_SEEDS_ARGS";
// Lines by which a rank reports its progress.
inline constexpr char kReadyLine[] = "startup-seeds: ready ";  // + process id
inline constexpr char kStartedLine[] = "startup-seeds: started";

struct StartedRank {
  pid_t pid = 0;
  int pid_fd = -1;  // -1: not yet known, or ended
  std::string words;
  absl::Time ready = absl::InfiniteFuture();  // when it calls Init
  absl::Time told = absl::InfiniteFuture();   // when its last line came
  absl::Time ended = absl::InfiniteFuture();

  bool Says(const std::string& text) const {
    return words.find(text) != std::string::npos;
  }
  // Returns its last line that is not a log line: abandoned work may go on
  // logging.
  std::string LastLine() const;
};

class StartupRun {
 public:
  explicit StartupRun(int world_size) : ranks_(world_size) {}
  // Kills what is left.
  ~StartupRun();
  StartupRun(const StartupRun&) = delete;
  StartupRun& operator=(const StartupRun&) = delete;

  // Launches all ranks, by --world.
  void Launch(const std::string& args);
  // Starts one rank, as by hand.
  void StartRank(int rank, const std::string& args,
                 std::vector<std::pair<std::string, std::string>> env = {});

  // Waits until rank `r` has printed `text`, or has ended; returns false at
  // `deadline`.
  bool WaitUntilSays(int r, const std::string& text, absl::Time deadline);
  // Waits until all except rank `except` have ended; returns false at
  // `deadline`.
  bool WaitUntilEnded(int except, absl::Time deadline);
  // Reads output until `deadline`.
  void WaitUntil(absl::Time deadline);

  StartedRank& operator[](int r) { return ranks_[r]; }

 private:
  // The pipe of a rank, or of all of them, with prefixes.
  struct Stream {
    int fd = -1;
    int rank = -1;  // -1: of all
    std::string line;
  };
  void Read(absl::Time deadline);
  void Take(Stream* stream, const std::string& line);

  std::vector<StartedRank> ranks_;
  std::vector<Stream> streams_;
  std::vector<pid_t> children_;
};

}  // namespace tessera
#endif  // TESTS_LAUNCH_STARTUP_RUN_H_
