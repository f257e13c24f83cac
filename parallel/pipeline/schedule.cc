#include "parallel/pipeline/schedule.h"

#include <algorithm>

#include "base/check.h"

namespace tessera {

using Kind = PipelineAction::Kind;

// A stage has to send its first forwards on before the last stage can begin a
// backward: as many as there are stages behind it. From then on each backward
// that reaches it frees the activations that its next forward takes.
std::vector<PipelineAction> ScheduleOf(PipelineSchedule schedule, int stage,
                                       int stages, int micro_batches) {
  TESSERA_CHECK(0 <= stage && stage < stages)
      << "stage " << stage << " of " << stages;
  TESSERA_CHECK(micro_batches >= 0) << micro_batches << " micro-batches";
  const int ahead = schedule == PipelineSchedule::kGPipe
                        ? micro_batches
                        : std::min(micro_batches, stages - stage - 1);
  std::vector<PipelineAction> actions;
  actions.reserve(2 * static_cast<size_t>(micro_batches));
  for (int i = 0; i < ahead; ++i) actions.push_back({Kind::kForward, i});
  for (int i = ahead; i < micro_batches; ++i) {
    actions.push_back({Kind::kForward, i});
    actions.push_back({Kind::kBackward, i - ahead});
  }
  for (int i = micro_batches - ahead; i < micro_batches; ++i) {
    actions.push_back({Kind::kBackward, i});
  }
  return actions;
}

double BubbleOf(int stages, int micro_batches) {
  TESSERA_CHECK(stages >= 1 && micro_batches >= 1)
      << stages << " stages, " << micro_batches << " micro-batches";
  return static_cast<double>(stages - 1) /
         static_cast<double>(micro_batches + stages - 1);
}

}  // namespace tessera
