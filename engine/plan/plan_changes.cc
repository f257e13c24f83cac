#include "engine/plan/plan_changes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {
namespace {

// The rough cost of each change as a part of a step's time; only their order
// matters.
constexpr double kStageBelow3 = 0.01, kHalfMicroBatch = 0.03, kStage3 = 0.1,
                 kRecompute = 0.3;

struct Candidate {
  double cost = 0;
  PlanChange change;
};

Candidate CandidateOf(const PlanReport& report, int from,
                      const StagePlan& stage, bool recompute, bool half) {
  Candidate made;
  std::vector<std::string> what;
  if (stage.stage != from) {
    what.push_back(absl::StrCat("zero_optimization.stage ", stage.stage));
    made.cost += stage.stage == 3 ? kStage3 : kStageBelow3 * stage.stage;
  }
  if (half) {
    what.push_back(
        "half of train_micro_batch_size_per_gpu, and twice "
        "gradient_accumulation_steps");
    made.cost += kHalfMicroBatch;
  }
  if (recompute) {
    what.push_back("activation_checkpointing.units \"auto\"");
    made.cost += kRecompute;
  }
  const PlannedBytes& peak = recompute ? stage.recomputed_peak : stage.peak;
  made.change.what = absl::StrJoin(what, ", with ");
  made.change.peak_bytes =
      peak.total() - (half ? peak[PlanKind::kActivations] / 2 : 0);
  return made;
}

}  // namespace

std::vector<PlanChange> CheapestThatFit(const PlanReport& report, int stage,
                                        size_t most) {
  std::vector<Candidate> candidates;
  for (const StagePlan& other : report.stages) {
    if (other.stage < stage) continue;
    for (const bool recompute : {false, true}) {
      if (recompute && other.recomputed_peak.total() == other.peak.total()) {
        continue;
      }
      for (const bool half : {false, true}) {
        const int changes = (other.stage != stage) + recompute + half;
        if (changes == 0 || changes > 2) continue;
        if (half && report.micro_batch < 2) continue;
        Candidate made = CandidateOf(report, stage, other, recompute, half);
        if (made.change.peak_bytes > report.memory_bytes) continue;
        candidates.push_back(std::move(made));
      }
    }
  }
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [](const auto& a, const auto& b) { return a.cost < b.cost; });
  std::vector<PlanChange> cheapest;
  for (Candidate& candidate : candidates) {
    if (cheapest.size() == most) break;
    cheapest.push_back(std::move(candidate.change));
  }
  return cheapest;
}

}  // namespace tessera
