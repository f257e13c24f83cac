#include "optim/sharded_step.h"

#include <utility>

#include "base/status.h"
#include "optim/gradients/adaptive_clipping.h"
#include "optim/gradients/clipping.h"
#include "optim/gradients/non_finite.h"

namespace tessera {
namespace {

AdaptiveClipping AdaptiveOf(const ShardedStepOptions& options, double divisor,
                            const ParameterGroups& groups) {
  AdaptiveClipping adaptive;
  adaptive.eps = options.adaptive_eps;
  adaptive.divisor = divisor;
  for (const int group : groups.of) {
    adaptive.clipping.push_back(
        options.adaptive_clipping[static_cast<size_t>(group)]);
  }
  return adaptive;
}

}  // namespace

absl::StatusOr<StepOutcome> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    Gradients* gradients, double divisor, const ShardedStepOptions& options,
    ShardedOptimizer* optimizer, Communicator* comm) {
  TESSERA_RETURN_IF_ERROR(optimizer->Prepare(*gradients));
  if (options.max_value > 0) {
    TESSERA_RETURN_IF_ERROR(ClampGradients(flats, options.max_value * divisor,
                                           options.skip_on_overflow,
                                           gradients));
  }
  if (!options.adaptive_clipping.empty()) {
    TESSERA_RETURN_IF_ERROR(ClipAdaptively(
        flats, AdaptiveOf(options, divisor, optimizer->groups()),
        [&] { optimizer->NoteChangedGradients(); }, gradients));
  }
  TESSERA_ASSIGN_OR_RETURN(
      StepDecision decision,
      DecideStep(flats, gradients, divisor, options, optimizer, comm));
  StepOutcome& outcome = decision.outcome;
  // A step that may turn out to be skipped is waited for, and what is not
  // finite in it found while its gradients are as they came.
  if (options.name_overflows &&
      (!outcome.pending() || outcome.may_be_skipped())) {
    TESSERA_ASSIGN_OR_RETURN(ShardedStepResult result, outcome.Take());
    if (result.skipped) {
      TESSERA_ASSIGN_OR_RETURN(result.non_finite,
                               FindNonFinite(flats, *gradients, comm));
    }
    outcome = StepOutcome(result);
  }
  if (!outcome.pending() && outcome.Take()->skipped) {
    optimizer->early().Drop();
    return std::move(outcome);
  }
  TESSERA_RETURN_IF_ERROR(optimizer->Step(gradients, decision.factor));
  return std::move(outcome);
}

}  // namespace tessera
