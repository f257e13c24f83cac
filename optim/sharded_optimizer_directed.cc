// Directed steps (optim/directed_step.h) of the units whose algorithm is such.
// They are made here and now, whatever tier states lie in: what is elsewhere is
// raised for each half.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/status.h"
#include "optim/sharded_optimizer.h"
#include "optim/step_scalars.h"

namespace tessera {

// The gradient becomes the direction, where it lies.
absl::StatusOr<DirectedUnit> ShardedOptimizer::Direct(
    size_t u, Gradients* gradients, const GradientFactor& factor) {
  FlatParameter& flat = *flats_[u];
  FlatGradient& gradient = gradients->of(u);
  DirectedUnit unit;
  unit.flat = &flat;
  unit.has_gradient = gradient.has_gradient();
  const UnitStep step(flat, unit.has_gradient, steps_, groups_.options,
                      groups_.of, factor, StepPhase::kDirection);
  TESSERA_ASSIGN_OR_RETURN(const Raised raised, gradient.Raise());
  unit.direction = gradient.elsewhere() == nullptr ? gradient.owned()
                                                   : gradient.owned().clone();
  states_[u].written = true;
  UnitStep::Counts counts;
  TESSERA_RETURN_IF_ERROR(StepHere(u, step, unit.direction, &counts).status());
  return unit;
}

// Of the factor there is none any more. Both halves are of one step, which
// counts when both have been made.
absl::Status ShardedOptimizer::Descend(size_t u, const DirectedUnit& unit,
                                       const Completion& completion,
                                       const FlatGradient& gradient,
                                       const GradientFactor& one,
                                       const AfterUnit& after) {
  const UnitStep step(*unit.flat, unit.has_gradient, steps_, groups_.options,
                      groups_.of, one, StepPhase::kDescent, completion.scales);
  CountStep(*unit.flat, gradient);
  UnitStep::Counts counts;
  TESSERA_ASSIGN_OR_RETURN(const bool working_written,
                           StepHere(u, step, unit.direction, &counts));
  return after ? after(u, working_written, {}) : absl::OkStatus();
}

// All directions, one exchange of their norms, all descents.
absl::Status ShardedOptimizer::StepLamb(const std::vector<size_t>& units,
                                        Gradients* gradients,
                                        const GradientFactor& factor,
                                        const GradientFactor& one,
                                        const AfterUnit& after) {
  std::vector<DirectedUnit> directed;
  std::vector<std::string> sums;
  for (const size_t u : units) {
    TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Direct(u, gradients, factor));
    TESSERA_ASSIGN_OR_RETURN(const Raised masters,
                             Raised::Of(flats_[u]->masters_buffer()));
    TESSERA_ASSIGN_OR_RETURN(std::string mine,
                             TrustSums(unit, flats_[u]->masters()));
    sums.push_back(std::move(mine));
    directed.push_back(std::move(unit));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      directed[0].flat->communicator()->AllGatherStrings(
          absl::StrJoin(sums, "\n"), CommTag{"trust ratios"}));
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<Completion> completions,
      TrustRatios(directed, all, groups_.options, groups_.of));
  for (size_t i = 0; i < units.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(Descend(units[i], directed[i], completions[i],
                                    gradients->of(units[i]), one, after));
    directed[i].direction.reset();
  }
  return absl::OkStatus();
}

// A unit is gathered while the one before it is computed, and that before sent
// back.
absl::Status ShardedOptimizer::StepMuon(const std::vector<size_t>& units,
                                        Gradients* gradients,
                                        const GradientFactor& factor,
                                        const GradientFactor& one,
                                        const AfterUnit& after) {
  constexpr size_t kBehind = 2;
  Orthogonalizer orthogonalizer(groups_.options, groups_.of);
  std::vector<DirectedUnit> directed;
  for (size_t i = 0; i < units.size() + kBehind; ++i) {
    if (i < units.size()) {
      TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit,
                               Direct(units[i], gradients, factor));
      TESSERA_RETURN_IF_ERROR(orthogonalizer.Start(unit));
      directed.push_back(std::move(unit));
    }
    if (i >= 1 && i - 1 < units.size()) {
      TESSERA_RETURN_IF_ERROR(orthogonalizer.Compute());
    }
    if (i < kBehind) continue;
    const size_t done = i - kBehind;
    TESSERA_ASSIGN_OR_RETURN(const Completion completion,
                             orthogonalizer.Finish());
    directed[done].direction = completion.direction;
    TESSERA_RETURN_IF_ERROR(Descend(units[done], directed[done], completion,
                                    gradients->of(units[done]), one, after));
    directed[done].direction.reset();
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::StepDirected(Gradients* gradients,
                                            const GradientFactor& factor,
                                            const AfterUnit& after) {
  std::vector<size_t> lamb, muon;
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients->of(u).has_step_gradient()) continue;
    if (FormulaOf(u) == Formula::kLambDirection) lamb.push_back(u);
    if (FormulaOf(u) == Formula::kMuonDirection) muon.push_back(u);
  }
  if (lamb.empty() && muon.empty()) return absl::OkStatus();
  GradientFactor one;
  if (factor.scalars.defined()) {  // a device that skips the step still does
    at::Tensor scalars = factor.scalars.clone();
    scalars.select(0, kFactor).fill_(1);
    one = GradientFactor(std::move(scalars), factor.may_skip);
  }
  if (!lamb.empty()) {
    TESSERA_RETURN_IF_ERROR(StepLamb(lamb, gradients, factor, one, after));
  }
  if (muon.empty()) return absl::OkStatus();
  return StepMuon(muon, gradients, factor, one, after);
}

}  // namespace tessera
