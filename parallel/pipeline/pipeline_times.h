// Pipeline times: when each stage of a pipeline computes what, predicted from
// the time that each stage takes.
#ifndef PARALLEL_PIPELINE_PIPELINE_TIMES_H_
#define PARALLEL_PIPELINE_PIPELINE_TIMES_H_

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

// The time that a stage computes for a micro-batch.
struct StageSeconds {
  double forward = 0;
  double backward = 0;
};

struct PipelineSpeeds {
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  int micro_batches = 1;
  std::vector<StageSeconds> stages;
  // From the end of a forward to the next stage's having its results, and from
  // the end of a backward to the previous one's having the gradients. No stage
  // computes less for it.
  double transfer_seconds = 0;
};

struct TimedAction {
  PipelineAction action;
  double begin = 0;  // seconds since the batch began
  double end = 0;
};

struct PipelineTimes {
  struct Stage {
    std::vector<TimedAction> actions;  // in the order of the schedule
    double idle_share = 0;             // of the batch's time
    // The most micro-batches of which the forward has run, or runs, and the
    // backward has not ended.
    int most_in_flight = 0;
  };
  std::vector<Stage> stages;
  double seconds = 0;  // of the batch
};

// Returns the times of a batch: each action begins as soon as its stage has
// ended the previous one and what it computes from is there. REQUIRES: at least
// one stage, no negative number. LOCAL; O(stages * micro-batches).
PipelineTimes PipelineTimesOf(const PipelineSpeeds& speeds);

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_PIPELINE_TIMES_H_
