// Progress: what a person sees of a run while it trains. Rank 0 writes; on a
// terminal one line that is drawn again and again, elsewhere a line at every
// tenth of the way.
//
//   [###...]  60/120  loss 2.4432  1910 tok/s  335/334 MB, counted peak 130/130
//                                              rank 0, rank 1
#ifndef EXAMPLES_GPT_PROGRESS_H_
#define EXAMPLES_GPT_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/memory/ledger.h"
#include "comm/communicator.h"

// Memory of one rank: what the kernel says it holds now, and the most that the
// engine's counted buffers (shards, gradients, gathered copies) held at once.
struct RankMemory {
  int64_t resident_bytes = 0;
  int64_t counted_peak_bytes = 0;
};

// Of all ranks, in their order; `ledger`: of the device that trains.
// COLLECTIVE.
absl::StatusOr<std::vector<RankMemory>> GatherMemory(
    const tessera::MemoryLedger& ledger, tessera::Communicator& communicator);

// "412/409 MB, counted peak 96/96"; of more than four ranks the least
// and the most: "405..412 MB, counted peak 96..97".
std::string Describe(const std::vector<RankMemory>& memory);

class Progress {
 public:
  struct State {
    int64_t step = 0;  // 1 to total_steps
    double loss = 0;
    double tokens_per_second = 0;
  };

  // Writes to `out` (borrowed) if that is not nullptr.
  Progress(FILE* out, int64_t total_steps);
  // Ends the line that is being drawn.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // True at the first step, at the last and at every tenth of the way: when
  // memory is asked for and, off a terminal, when a line is written. The same
  // on all ranks.
  bool IsDue(int64_t step) const;

  void SetMemory(const std::vector<RankMemory>& memory);
  void Show(const State& state);
  // Writes a whole line; the progress goes on below it.
  void Say(const std::string& line);

 private:
  std::string Line(const State& state, int columns) const;

  FILE* out_;
  bool terminal_;
  bool drawing_ = false;  // a line without its end is on the terminal
  int64_t total_steps_;
  std::string memory_;
};

#endif  // EXAMPLES_GPT_PROGRESS_H_
