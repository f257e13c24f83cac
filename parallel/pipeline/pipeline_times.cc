#include "parallel/pipeline/pipeline_times.h"

#include <algorithm>

#include "base/check.h"

namespace tessera {
namespace {

// Ends of actions, by stage and micro-batch; below 0: not there yet.
class ActionEnds {
 public:
  ActionEnds(size_t stages, int micro_batches)
      : width_(static_cast<size_t>(micro_batches)),
        forward_(stages * width_, -1),
        backward_(stages * width_, -1) {}

  double& At(const PipelineAction& action, size_t stage) {
    const size_t at = stage * width_ + static_cast<size_t>(action.micro_batch);
    return action.kind == PipelineAction::Kind::kForward ? forward_[at]
                                                         : backward_[at];
  }

 private:
  const size_t width_;
  std::vector<double> forward_, backward_;
};

// Returns when what the action computes from is there; below 0: not known yet.
// The last stage's backward begins where its forward has ended.
double ReadyAt(const PipelineAction& action, size_t stage,
               const PipelineSpeeds& speeds, ActionEnds* ends) {
  const bool forward = action.kind == PipelineAction::Kind::kForward;
  const size_t last = speeds.stages.size() - 1;
  if (forward && stage == 0) return 0;
  if (!forward && stage == last) {
    return ends->At({PipelineAction::Kind::kForward, action.micro_batch},
                    stage);
  }
  const double sent = ends->At(action, forward ? stage - 1 : stage + 1);
  return sent < 0 ? sent : sent + speeds.transfer_seconds;
}

// Gives the next actions of a stage their times, as far as those of its
// neighbours are known; returns how many.
int Advance(size_t stage, const std::vector<PipelineAction>& actions,
            const PipelineSpeeds& speeds, ActionEnds* ends,
            PipelineTimes::Stage* times) {
  const StageSeconds& seconds = speeds.stages[stage];
  int count = 0;
  for (size_t i = times->actions.size(); i < actions.size(); ++i, ++count) {
    const PipelineAction& action = actions[i];
    const double ready = ReadyAt(action, stage, speeds, ends);
    if (ready < 0) break;
    const double free = i == 0 ? 0 : times->actions.back().end;
    const double begin = std::max(free, ready);
    const double end = begin + (action.kind == PipelineAction::Kind::kForward
                                    ? seconds.forward
                                    : seconds.backward);
    ends->At(action, stage) = end;
    times->actions.push_back({action, begin, end});
  }
  return count;
}

int MostInFlight(const std::vector<PipelineAction>& actions) {
  int now = 0, most = 0;
  for (const PipelineAction& action : actions) {
    now += action.kind == PipelineAction::Kind::kForward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

}  // namespace

PipelineTimes PipelineTimesOf(const PipelineSpeeds& speeds) {
  TESSERA_CHECK(!speeds.stages.empty()) << "a pipeline without stages";
  const size_t stages = speeds.stages.size();
  std::vector<std::vector<PipelineAction>> actions;
  PipelineTimes times;
  times.stages.resize(stages);
  for (size_t s = 0; s < stages; ++s) {
    actions.push_back(ScheduleOf(speeds.schedule, static_cast<int>(s),
                                 static_cast<int>(stages),
                                 speeds.micro_batches));
    times.stages[s].most_in_flight = MostInFlight(actions[s]);
  }
  ActionEnds ends(stages, speeds.micro_batches);
  int left = 2 * speeds.micro_batches * static_cast<int>(stages);
  while (left > 0) {
    int done = 0;
    for (size_t s = 0; s < stages; ++s) {
      done += Advance(s, actions[s], speeds, &ends, &times.stages[s]);
    }
    TESSERA_CHECK(done > 0) << "the stages wait for each other";
    left -= done;
  }
  for (const PipelineTimes::Stage& stage : times.stages) {
    if (stage.actions.empty()) continue;
    times.seconds = std::max(times.seconds, stage.actions.back().end);
  }
  for (size_t s = 0; s < stages && times.seconds > 0; ++s) {
    const double busy = speeds.micro_batches *
                        (speeds.stages[s].forward + speeds.stages[s].backward);
    times.stages[s].idle_share = 1 - busy / times.seconds;
  }
  return times;
}

}  // namespace tessera
