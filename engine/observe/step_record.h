// StepRecord: the metrics of one optimizer step, of all ranks; and what each
// rank tells of it.
#ifndef ENGINE_OBSERVE_STEP_RECORD_H_
#define ENGINE_OBSERVE_STEP_RECORD_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "base/step_memory/held_memory.h"
#include "monitor/step_metrics.h"

namespace tessera {

// Where a step's time went, in seconds of the host's clock.
struct StepTimes {
  double step = 0;      // from the end of the step before to its own
  double forward = 0;   // from the end of a Backward or Step to a Backward
  double backward = 0;  // in Backward
  // Of that, in autograd; the rest was waited for reductions that were not done
  // when it ended.
  double autograd = 0;
  double update = 0;  // in Step
};

// Of one rank. NaN: not known.
struct RankMetrics {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  double loss_sum = 0, loss_weight = 0;  // their quotient is the mean
  StepTimes times;
  double tokens = 0;
  double peak_bytes = 0;
  HeldMemory at_peak;
  double data_wait = kUnknown;     // seconds that forwards waited for data
  double exposed_comm = kUnknown;  // seconds blocked in waits for collectives

  // Its numbers, for a collective, and back: `values` are numel(), which is the
  // same on all ranks.
  static int numel();
  void ToValues(absl::Span<double> values) const;
  static RankMetrics FromValues(absl::Span<const double> values);
};

struct StepRecord {
  static constexpr double kUnknown = RankMetrics::kUnknown;

  int64_t step = 0;     // optimizer steps done so far, as Engine::step()
  int64_t samples = 0;  // of all ranks so far, in steps done or skipped
  double unix_seconds = 0;

  double loss = kUnknown;  // mean over ranks and micro-batches
  // A parameter group of the optimizer.
  struct Group {
    std::string name;
    double learning_rate = 0;
  };
  std::vector<Group> groups;    // "default" first; none without an optimizer
  double grad_norm = kUnknown;  // before clipping
  double loss_scale = 1;
  bool has_loss_scale = false;  // fp16
  bool skipped = false;
  int64_t skipped_steps = 0;

  StepTimes times;  // of rank 0, but `step`, which is the slowest rank's
  // Of all ranks together.
  double samples_per_second = 0;
  double tokens = 0, tokens_per_second = 0;  // 0: nobody has said how many
  // Of one rank; unknown without tokens, and before a profile.
  double tflops = kUnknown;
  double mfu = kUnknown;  // of the device's peak

  // Of the rank that has most of it.
  int64_t peak_bytes = 0;
  HeldMemory at_peak;
  double data_wait = kUnknown, exposed_comm = kUnknown;  // seconds

  // Which ranks took longest and shortest, in forward alone: what is in a
  // backward waits for the others at its end.
  struct Extremes {
    int slowest = 0, fastest = 0;
    double most = 0, least = 0;  // seconds
  };
  Extremes step_times, forward_times;
  int world_size = 1;
};

// Of all ranks, in their order. The rest of the record is the caller's.
void AddRanks(absl::Span<const RankMetrics> ranks, StepRecord* record);

// Its scalars, for the writers; what is not known is left out.
StepMetrics MetricsOf(const StepRecord& record);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_STEP_RECORD_H_
