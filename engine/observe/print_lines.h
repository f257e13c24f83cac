// The lines that rank 0 logs of its steps (steps_per_print,
// wall_clock_breakdown), after DeepSpeed's.
#ifndef ENGINE_OBSERVE_PRINT_LINES_H_
#define ENGINE_OBSERVE_PRINT_LINES_H_

#include <string>

#include "engine/observe/step_record.h"

namespace tessera {

// Of the steps since the line before: how many, and their times together.
struct PrintInterval {
  int64_t steps = 0;
  int64_t samples = 0;  // of all ranks
  double tokens = 0;
  StepTimes times;

  // A step of `batch` samples.
  void Add(const StepTimes& step, int64_t batch);
};

// "step=20, skipped=0, lr=[0.001], loss=2.4432, grad_norm=0.81, 123.4
// samples/s, ..."; `speed`: with what is behind the norm.
std::string ProgressLine(const StepRecord& record,
                         const PrintInterval& interval, bool speed);
// "time (ms) | step: 12.34 | fwd: 3.21 | bwd: 5.60 | bwd_inner: 5.10 |
// bwd_allreduce: 0.50 | update: 2.10 | other: 1.43", means of a step.
std::string BreakdownLine(const PrintInterval& interval);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_PRINT_LINES_H_
