// The lines that rank 0 logs about steps (steps_per_print,
// wall_clock_breakdown), like DeepSpeed's.
#ifndef ENGINE_OBSERVE_PRINT_LINES_H_
#define ENGINE_OBSERVE_PRINT_LINES_H_

#include <string>

#include "engine/observe/step_record.h"

namespace tessera {

// The steps since the previous line: their number, and the sums of their times.
struct PrintInterval {
  int64_t steps = 0;
  int64_t samples = 0;  // of all ranks
  double tokens = 0;
  StepTimes times;

  // Adds a step of `batch` samples.
  void Add(const StepTimes& step, int64_t batch);
};

// Returns "step=20, skipped=0, lr=[0.001], loss=2.4432, grad_norm=0.81, 123.4
// samples/s, ..."; `speed`: includes what follows the norm.
std::string ProgressLine(const StepRecord& record,
                         const PrintInterval& interval, bool speed);
// Returns "time (ms) | step: 12.34 | fwd: 3.21 | bwd: 5.60 | bwd_inner: 5.10 |
// bwd_allreduce: 0.50 | update: 2.10 | other: 1.43", with means per step.
std::string BreakdownLine(const PrintInterval& interval);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_PRINT_LINES_H_
