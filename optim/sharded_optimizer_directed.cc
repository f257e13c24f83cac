// Directed steps (optim/directed_step.h) of the units whose algorithm is such.
// They are made here and now, whatever tier states lie in: what is elsewhere is
// raised for each half.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "optim/factored/adafactor.h"
#include "optim/sharded_optimizer.h"
#include "optim/step_scalars.h"

namespace tessera {
namespace {

// The gradient: where it lies, if it is there and of the masters' dtype.
// REQUIRES: FlatGradient::Raise.
at::Tensor PlaceOfDirection(FlatGradient* gradient) {
  return gradient->owned().to(gradient->flat().step_dtype(),
                              /*non_blocking=*/false,
                              /*copy=*/gradient->elsewhere() != nullptr);
}

}  // namespace

absl::Status ShardedOptimizer::CheckDirected(size_t u) const {
  const FlatParameter& flat = *flats_[u];
  const char* const name = NameOf(FormulaOf(u));
  if (flat.updated_on_host()) {
    return absl::UnimplementedError(
        absl::StrCat("optimizer ", name, ": states of unit ", flat.name(),
                     " cannot lie on the host or a disk while it is on ",
                     flat.device().str(), "; leave offload_optimizer out"));
  }
  for (const auto& p : flat.parameters()) {
    if (FormulaOf(u) != Formula::kAdafactorDirection) break;
    if (!p.tensor.is_complex()) continue;
    return absl::UnimplementedError(absl::StrCat(
        "optimizer ", name, ": parameter '", p.name,
        "' is complex, which Adafactor is not defined for; use AdamW"));
  }
  return absl::OkStatus();
}

// The gradient becomes the direction.
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
  unit.direction = PlaceOfDirection(&gradient);
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

// One exchange of the norms of masters and directions, and all descents.
absl::Status ShardedOptimizer::DescendByNorms(
    const std::vector<size_t>& units, std::vector<DirectedUnit> directed,
    Gradients* gradients, const GradientFactor& one, const AfterUnit& after) {
  std::vector<std::string> sums;
  for (size_t i = 0; i < units.size(); ++i) {
    FlatParameter& flat = *flats_[units[i]];
    TESSERA_ASSIGN_OR_RETURN(const Raised masters,
                             Raised::Of(flat.masters_buffer()));
    TESSERA_ASSIGN_OR_RETURN(std::string mine,
                             TrustSums(directed[i], flat.masters()));
    sums.push_back(std::move(mine));
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

absl::Status ShardedOptimizer::StepLamb(const std::vector<size_t>& units,
                                        Gradients* gradients,
                                        const GradientFactor& factor,
                                        const GradientFactor& one,
                                        const AfterUnit& after) {
  std::vector<DirectedUnit> directed;
  for (const size_t u : units) {
    TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Direct(u, gradients, factor));
    directed.push_back(std::move(unit));
  }
  return DescendByNorms(units, std::move(directed), gradients, one, after);
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

// All means, then all directions, and descents by norms.
absl::Status ShardedOptimizer::StepAdafactor(const std::vector<size_t>& units,
                                             Gradients* gradients,
                                             const GradientFactor& factor,
                                             const GradientFactor& one,
                                             const AfterUnit& after) {
  AdafactorStep step(factor.may_skip ? factor.scalars.select(0, kSkip).ne(0)
                                     : at::Tensor());
  std::vector<DirectedUnit> directed;
  for (const size_t u : units) {
    FlatGradient& gradient = gradients->of(u);
    DirectedUnit unit;
    unit.flat = flats_[u].get();
    unit.has_gradient = gradient.has_gradient();
    TESSERA_ASSIGN_OR_RETURN(const Raised raised, gradient.Raise());
    unit.direction = PlaceOfDirection(&gradient);
    half_stepped_ = true;
    Multiply(unit.direction, factor);
    std::vector<AdafactorStep::Parameter> parameters;
    for (size_t i = 0; i < unit.has_gradient.size(); ++i) {
      const auto index = static_cast<size_t>(unit.flat->parameters()[i].index);
      const auto group = static_cast<size_t>(groups_.of[index]);
      parameters.push_back(
          {&groups_.options[group], steps_[index] + 1, unit.has_gradient[i]});
    }
    step.Add(*unit.flat, unit.direction, states_[u].factored, parameters);
    states_[u].written = true;
    directed.push_back(std::move(unit));
  }
  TESSERA_RETURN_IF_ERROR(step.FindMeans());
  for (size_t i = 0; i < units.size(); ++i) step.Direct(i);
  return DescendByNorms(units, std::move(directed), gradients, one, after);
}

absl::Status ShardedOptimizer::StepDirected(Gradients* gradients,
                                            const GradientFactor& factor,
                                            const AfterUnit& after) {
  std::vector<size_t> lamb, muon, adafactor;
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients->of(u).has_step_gradient()) continue;
    if (FormulaOf(u) == Formula::kLambDirection) lamb.push_back(u);
    if (FormulaOf(u) == Formula::kMuonDirection) muon.push_back(u);
    if (FormulaOf(u) == Formula::kAdafactorDirection) adafactor.push_back(u);
  }
  if (lamb.empty() && muon.empty() && adafactor.empty()) {
    return absl::OkStatus();
  }
  GradientFactor one;
  if (factor.scalars.defined()) {  // a device that skips the step still does
    at::Tensor scalars = factor.scalars.clone();
    scalars.select(0, kFactor).fill_(1);
    one = GradientFactor(std::move(scalars), factor.may_skip);
  }
  if (!lamb.empty()) {
    TESSERA_RETURN_IF_ERROR(StepLamb(lamb, gradients, factor, one, after));
  }
  if (!adafactor.empty()) {
    TESSERA_RETURN_IF_ERROR(
        StepAdafactor(adafactor, gradients, factor, one, after));
  }
  if (muon.empty()) return absl::OkStatus();
  return StepMuon(muon, gradients, factor, one, after);
}

}  // namespace tessera
