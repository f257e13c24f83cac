// StepRecord: the metrics of one optimizer step over all ranks; RankMetrics:
// what each rank contributes.
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
  double step = 0;      // from the end of the previous step to its own
  double forward = 0;   // from the end of a Backward or Step to a Backward
  double backward = 0;  // in Backward
  // The part of `backward` in autograd; the rest is waiting for reductions that
  // were not done when autograd ended.
  double autograd = 0;
  double update = 0;  // in Step
};

// The metrics of one rank. NaN: not known.
struct RankMetrics {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  double loss_sum = 0, loss_weight = 0;  // their quotient is the mean
  StepTimes times;
  double tokens = 0;
  double peak_bytes = 0;
  HeldMemory at_peak;
  double data_wait = kUnknown;     // seconds that forwards waited for data
  double exposed_comm = kUnknown;  // seconds blocked in waits for collectives

  // Convert to numbers for a collective, and back: there are numel() `values`,
  // which is identical on all ranks.
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

  StepTimes times;  // rank 0's, except `step`: the slowest rank's
  // Samples and tokens per second are of all ranks together.
  double samples_per_second = 0;
  double tokens = 0, tokens_per_second = 0;  // 0: not known
  // Rates of one rank; unknown without tokens, and before a profile.
  double tflops = kUnknown;
  double mfu = kUnknown;  // of the device's peak

  // The largest of all ranks.
  int64_t peak_bytes = 0;
  HeldMemory at_peak;
  double data_wait = kUnknown, exposed_comm = kUnknown;  // seconds

  // The ranks that took longest and shortest. Forwards are compared alone,
  // since a backward waits for the other ranks at its end.
  struct Extremes {
    int slowest = 0, fastest = 0;
    double most = 0, least = 0;  // seconds
  };
  Extremes step_times, forward_times;
  int world_size = 1;
};

// Adds the metrics of all ranks, in their order, to a record; the caller sets
// the rest.
void AddRanks(absl::Span<const RankMetrics> ranks, StepRecord* record);

// Returns a record's scalars, for the writers, without those that are not
// known.
StepMetrics MetricsOf(const StepRecord& record);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_STEP_RECORD_H_
