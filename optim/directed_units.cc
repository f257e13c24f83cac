#include "optim/directed_units.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "optim/apply_step.h"
#include "optim/factored/adafactor.h"
#include "optim/step_scalars.h"

namespace tessera {

absl::Status CheckDirected(const FlatParameter& flat, Formula formula) {
  const char* const name = NameOf(formula);
  if (flat.updated_on_host()) {
    return absl::UnimplementedError(
        absl::StrCat("optimizer ", name, ": states of unit ", flat.name(),
                     " cannot lie on the host or a disk while it is on ",
                     flat.device().str(), "; leave offload_optimizer out"));
  }
  for (const auto& p : flat.parameters()) {
    if (formula != Formula::kAdafactorDirection) break;
    if (!p.tensor.is_complex()) continue;
    return absl::UnimplementedError(absl::StrCat(
        "optimizer ", name, ": parameter '", p.name,
        "' is complex, which Adafactor is not defined for; use AdamW"));
  }
  return absl::OkStatus();
}

// The direction is made where the gradient lies, if that is there and of the
// masters' dtype. REQUIRES: FlatGradient::Raise.
absl::StatusOr<DirectedUnit> DirectedUnits::Begin(size_t u) {
  FlatGradient& gradient = parts_.gradients->of(u);
  DirectedUnit unit;
  unit.flat = parts_.flats[u].get();
  unit.has_gradient = gradient.has_gradient();
  unit.direction =
      gradient.owned().to(unit.flat->step_dtype(),
                          /*non_blocking=*/false,
                          /*copy=*/gradient.elsewhere() != nullptr);
  return unit;
}

absl::StatusOr<bool> DirectedUnits::Apply(size_t u, const UnitStep& step,
                                          const at::Tensor& gradient) {
  UnitStep::Counts counts;
  return StepHere(parts_.flats[u].get(), step, gradient, &counts,
                  parts_.changed);
}

// The gradient becomes the direction.
absl::StatusOr<DirectedUnit> DirectedUnits::Direct(size_t u) {
  TESSERA_ASSIGN_OR_RETURN(const Raised raised,
                           parts_.gradients->of(u).Raise());
  TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Begin(u));
  const UnitStep step(*unit.flat, unit.has_gradient, parts_.counts.steps(),
                      parts_.groups.options, parts_.groups.of, factor_,
                      StepPhase::kDirection);
  TESSERA_RETURN_IF_ERROR(Apply(u, step, unit.direction).status());
  return unit;
}

// The factor is applied already.
absl::Status DirectedUnits::Descend(size_t u, const DirectedUnit& unit,
                                    const Completion& completion) {
  const UnitStep step(*unit.flat, unit.has_gradient, parts_.counts.steps(),
                      parts_.groups.options, parts_.groups.of, one_,
                      StepPhase::kDescent, completion.scales);
  TESSERA_ASSIGN_OR_RETURN(const bool working_written,
                           Apply(u, step, unit.direction));
  return unit.flat->PublishOwned(
      {.parameters = unit.has_gradient, .working_written = working_written});
}

// One exchange of the norms of masters and directions, and all descents.
absl::Status DirectedUnits::DescendByNorms(const std::vector<size_t>& units,
                                           std::vector<DirectedUnit> directed) {
  std::vector<NormSum> sums;
  for (const DirectedUnit& unit : directed) {
    TESSERA_ASSIGN_OR_RETURN(const RaisedValue masters,
                             unit.flat->states().RaiseValue());
    AddTrustSums(unit, masters.View(), &sums);
  }
  Communicator* const comm = directed[0].flat->communicator();
  TESSERA_RETURN_IF_ERROR(SumOverRanks({1, comm->world_size()},
                                       CommTag{"trust ratios"}, comm, &sums));
  const std::vector<Completion> completions =
      TrustRatios(directed, sums, parts_.groups.options, parts_.groups.of);
  for (size_t i = 0; i < units.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(Descend(units[i], directed[i], completions[i]));
    directed[i].direction.reset();
  }
  return absl::OkStatus();
}

absl::Status DirectedUnits::StepLamb(const std::vector<size_t>& units) {
  std::vector<DirectedUnit> directed;
  for (const size_t u : units) {
    TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Direct(u));
    directed.push_back(std::move(unit));
  }
  return DescendByNorms(units, std::move(directed));
}

// A unit is gathered while the one before it is computed, and that before sent
// back.
absl::Status DirectedUnits::StepMuon(const std::vector<size_t>& units) {
  constexpr size_t kBehind = 2;
  Orthogonalizer orthogonalizer(parts_.groups.options, parts_.groups.of);
  std::vector<DirectedUnit> directed;
  for (size_t i = 0; i < units.size() + kBehind; ++i) {
    if (i < units.size()) {
      TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Direct(units[i]));
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
    TESSERA_RETURN_IF_ERROR(Descend(units[done], directed[done], completion));
    directed[done].direction.reset();
  }
  return absl::OkStatus();
}

// All means, then all directions, and descents by norms.
absl::Status DirectedUnits::StepAdafactor(const std::vector<size_t>& units) {
  AdafactorStep step(factor_.may_skip ? factor_.scalars.select(0, kSkip).ne(0)
                                      : at::Tensor());
  std::vector<DirectedUnit> directed;
  for (const size_t u : units) {
    TESSERA_ASSIGN_OR_RETURN(const Raised raised,
                             parts_.gradients->of(u).Raise());
    TESSERA_ASSIGN_OR_RETURN(DirectedUnit unit, Begin(u));
    *parts_.changed = true;
    Multiply(unit.direction, factor_);
    std::vector<AdafactorStep::Parameter> parameters;
    for (size_t i = 0; i < unit.has_gradient.size(); ++i) {
      const auto index = static_cast<size_t>(unit.flat->parameters()[i].index);
      const auto group = static_cast<size_t>(parts_.groups.of[index]);
      parameters.push_back({&parts_.groups.options[group],
                            parts_.counts.steps()[index] + 1,
                            unit.has_gradient[i]});
    }
    step.Add(*unit.flat, unit.direction, parts_.states.factored(u), parameters);
    directed.push_back(std::move(unit));
  }
  TESSERA_RETURN_IF_ERROR(step.FindMeans());
  for (size_t i = 0; i < units.size(); ++i) step.Direct(i);
  return DescendByNorms(units, std::move(directed));
}

absl::Status DirectedUnits::Step(const std::vector<size_t>& units) {
  std::vector<size_t> lamb, muon, adafactor;
  for (const size_t u : units) {
    const Formula formula = parts_.states.FormulaOf(u);
    if (formula == Formula::kLambDirection) lamb.push_back(u);
    if (formula == Formula::kMuonDirection) muon.push_back(u);
    if (formula == Formula::kAdafactorDirection) adafactor.push_back(u);
  }
  if (factor_.scalars.defined()) {
    at::Tensor scalars = factor_.scalars.clone();
    scalars.select(0, kFactor).fill_(1);
    one_ = GradientFactor(std::move(scalars), factor_.may_skip);
  }
  if (!lamb.empty()) TESSERA_RETURN_IF_ERROR(StepLamb(lamb));
  if (!adafactor.empty()) TESSERA_RETURN_IF_ERROR(StepAdafactor(adafactor));
  return muon.empty() ? absl::OkStatus() : StepMuon(muon);
}

}  // namespace tessera
