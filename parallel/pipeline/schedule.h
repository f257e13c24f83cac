// Schedules of a pipeline: in which order a stage runs the forwards and
// backwards of a batch's micro-batches.
//
//   4 micro-batches (0 to 3), 3 stages; digits are forwards, letters backwards
//
//   1F1B    stage 0   0 1 2 . . a 3 b . c . d
//           stage 1   . 0 1 . a 2 b 3 c . d .
//           stage 2   . . 0 a 1 b 2 c 3 d . .
//
//   GPipe   stage 0   0 1 2 3 . . . . a b c d
//           stage 1   . 0 1 2 3 . . a b c d .
//           stage 2   . . 0 1 2 3 a b c d . .
//
// Both take the same time if all stages are equally fast. With 1F1B, stage s
// holds the activations of at most p - s micro-batches, with GPipe those of all
// m.
//
// Invariant: a stage runs forwards in the order of micro-batches, and backwards
// too, so that what two stages exchange comes in one order.
// Threads: any.
#ifndef PARALLEL_PIPELINE_SCHEDULE_H_
#define PARALLEL_PIPELINE_SCHEDULE_H_

#include <vector>

namespace tessera {

enum class PipelineSchedule { k1F1B, kGPipe };

struct PipelineAction {
  enum class Kind { kForward, kBackward };
  Kind kind = Kind::kForward;
  int micro_batch = 0;

  bool operator==(const PipelineAction& other) const {
    return kind == other.kind && micro_batch == other.micro_batch;
  }
};

// Returns what `stage` of `stages` runs, in order: each micro-batch's forward
// and backward once. REQUIRES: 0 <= stage < stages, micro_batches >= 0. LOCAL.
std::vector<PipelineAction> ScheduleOf(PipelineSchedule schedule, int stage,
                                       int stages, int micro_batches);

// Returns the share of a batch's time in which a stage is idle, by either
// schedule, if all stages take the same time: (p - 1) / (m + p - 1).
// REQUIRES: stages >= 1, micro_batches >= 1. LOCAL.
double BubbleOf(int stages, int micro_batches);

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_SCHEDULE_H_
