// StepReplay: computes what a rank holds in the course of a step from a trace:
// the trace's tensors, and what an engine does besides at each use of a
// parameter and each gradient, in their order.
//
//   kTouch     the flat is gathered, others are ahead of it or freed: the
//              engine's own Schedule decides
//   kGradient a gradient moves to the flat's local gradient; complete buckets
//   are
//              reduced (gradient_replay.h)
//   others     tensors come and go, except those that are made again
//              (absences.h, recomputation.h)
//
// The step is replayed as often as an engine needs to know a step (its
// schedule, and which tensors will be gradients); the last replay counts.
#ifndef ENGINE_PLAN_REPLAY_STEP_REPLAY_H_
#define ENGINE_PLAN_REPLAY_STEP_REPLAY_H_

#include <cstdint>
#include <vector>

#include "engine/plan/replay/plan_ledger.h"
#include "engine/plan/replay/planned_flat.h"
#include "engine/plan/replay/recomputation.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/gradients.h"
#include "sharding/trace/trace.h"

namespace tessera {

struct StepReplayOptions {
  ScheduleOptions schedule;
  GradientOptions gradients;
  int world_size = 1;
  int64_t micro_batches = 1;  // gradient_accumulation_steps
  bool accumulates_locally = false;
  bool has_optimizer = true;
  bool shares_working_copy = false;
  RecomputationOptions recomputed;
  int64_t buffer_bytes = 0;  // of the module, all the time
  int64_t stream_bytes =
      0;  // buffers through which states on a disk are updated
};

struct StepReplayResult {
  PlannedBytes between_steps;
  PlannedBytes peak;
  int64_t peak_event = 0;  // of the trace
  // Whole bytes that this rank gathered and reduced in one step, and the number
  // of collectives.
  int64_t gathered_bytes = 0, reduced_bytes = 0;
  int64_t gathers = 0, reductions = 0;
  Recomputation recomputation;  // of each micro-batch
};

// Replays steps. `flat_of[i]`: the flat of the trace's parameter i, -1: the
// engine does not manage it.
StepReplayResult ReplayStep(const Trace& trace,
                            const std::vector<PlannedFlat>& flats,
                            const std::vector<int>& flat_of,
                            const StepReplayOptions& options);

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_STEP_REPLAY_H_
