#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/device_kernels.h"

namespace tessera {

ShardedOptimizer::ShardedOptimizer(
    std::vector<std::shared_ptr<FlatParameter>> flats, ParameterGroups groups)
    : flats_(std::move(flats)), groups_(std::move(groups)) {
  size_t parameters = 0;
  for (const auto& flat : flats_) parameters += flat->parameters().size();
  groups_.of.resize(parameters);
  counts_ = std::make_unique<StepCounts>(parameters, groups_.options.size());
  states_ = std::make_unique<OptimizerStates>(flats_, &groups_);
  early_ = std::make_unique<EarlySteps>(flats_, &groups_, states_.get(),
                                        counts_.get());
  in_backward_ = std::make_unique<StepsInBackward>(
      flats_, &groups_, states_.get(), counts_.get());
}

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(
    std::vector<std::shared_ptr<FlatParameter>> flats, ParameterGroups groups) {
  auto made = std::unique_ptr<ShardedOptimizer>(
      new ShardedOptimizer(std::move(flats), std::move(groups)));
  for (size_t u = 0; u < made->flats_.size(); ++u) {
    made->is_directed_.push_back(IsDirection(made->states_->FormulaOf(u)));
    TESSERA_RETURN_IF_ERROR(made->CheckKernels(u));
    if (!made->flats_[u]->trainable()) continue;
    TESSERA_RETURN_IF_ERROR(made->states_->Make(u));
  }
  return made;
}

// Operators do a program's own, libtorch's kernels plain AdamW of one dtype on
// any device.
absl::Status ShardedOptimizer::CheckKernels(size_t u) const {
  const FlatParameter& flat = *flats_[u];
  const at::Device device = flat.update_device();
  const Formula formula = states_->FormulaOf(u);
  if (is_directed_[u]) TESSERA_RETURN_IF_ERROR(CheckDirected(flat, formula));
  const bool plain = IsPlainAdamW(groups_.options) &&
                     states_->OptionsOf(u).states == StateType::kFloat32 &&
                     flat.master_dtype() == flat.step_dtype();
  if (device.is_cpu() || plain || is_custom() ||
      DeviceKernelsOf(device.type()) != nullptr) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat("optimizer: there are no kernels for it on ", device.str(),
                   "; use AdamW, or offload the optimizer to the CPU"));
}

std::string ShardedOptimizer::name() const {
  std::set<std::string> names;
  for (size_t u = 0; u < flats_.size(); ++u) {
    names.insert(OptimizerNameOf(states_->OptionsOf(u)));
  }
  return absl::StrJoin(names, "+");
}

absl::Status ShardedOptimizer::Prepare(const Gradients& gradients) {
  half_stepped_ = false;
  groups_.options = counts_->WithShares(std::move(groups_.options));
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients.of(u).has_step_gradient()) continue;
    TESSERA_RETURN_IF_ERROR(states_->Make(u));
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Step(Gradients* gradients,
                                    const GradientFactor& factor) {
  return CatchTorch("optimizer step", [&]() -> absl::Status {
    TorchScope scope;
    std::vector<size_t> units;
    for (size_t u = 0; u < flats_.size(); ++u) {
      if (gradients->of(u).has_step_gradient() || in_backward_->stepped(u)) {
        units.push_back(u);
      }
    }
    // What is always whole is gathered behind its update, before anything that
    // the next forward gathers: it is updated first.
    std::stable_partition(units.begin(), units.end(),
                          [&](size_t u) { return !flats_[u]->can_be_freed(); });
    std::vector<Awaited> awaited;
    absl::Status status = StepUnits(units, gradients, factor, &awaited);
    // All of them, whatever becomes of some: the device writes to their memory.
    for (const Awaited& each : awaited) status.Update(each.updated.Wait());
    TESSERA_RETURN_IF_ERROR(status);
    for (const Awaited& each : awaited) {
      TESSERA_RETURN_IF_ERROR(flats_[each.flat]->PublishOwned(
          {.parameters = gradients->of(each.flat).has_gradient(),
           .working_written = true}));
    }
    half_stepped_ = false;
    counts_->Begin();
    for (const size_t u : units) {
      counts_->Count(*flats_[u], gradients->of(u).has_gradient(), groups_);
      states_->SetWritten(u);
    }
    in_backward_->End();
    return absl::OkStatus();
  });
}

// What is always whole on a device, and is not to go on behind the program, is
// awaited when all updates have begun: its all-gather follows, in the same
// order on all ranks.
absl::Status ShardedOptimizer::StepUnits(const std::vector<size_t>& units,
                                         Gradients* gradients,
                                         const GradientFactor& factor,
                                         std::vector<Awaited>* awaited) {
  UnitStep::Counts counts;
  std::vector<size_t> directed;
  early_->BeginStep();
  for (const size_t u : units) {
    if (is_directed_[u]) {
      directed.push_back(u);
      continue;
    }
    FlatParameter& flat = *flats_[u];
    OwnedChange change = {.parameters = gradients->of(u).has_gradient(),
                          .working_written = true};
    if (gradients->of(u).has_step_gradient()) {
      TESSERA_RETURN_IF_ERROR(StepUnit(u, gradients, factor, &counts, &change));
    }
    if (in_backward_->stepped(u)) {
      change.working_written &= in_backward_->working_written(u);
    }
    half_stepped_ = true;
    if (change.updated.valid() && !flat.can_be_freed() &&
        !flat.options().overlap) {
      awaited->push_back({u, change.updated});
    } else {
      TESSERA_RETURN_IF_ERROR(flat.PublishOwned(std::move(change)));
    }
  }
  early_->EndStep();
  if (directed.empty()) return absl::OkStatus();
  return DirectedUnits(
             {flats_, groups_, *states_, *counts_, gradients, &half_stepped_},
             factor)
      .Step(directed);
}

// Parameters that StepsInBackward has stepped are left out.
absl::Status ShardedOptimizer::StepUnit(size_t u, Gradients* gradients,
                                        const GradientFactor& factor,
                                        UnitStep::Counts* counts,
                                        OwnedChange* change) {
  FlatParameter& flat = *flats_[u];
  const FlatGradient& gradient = gradients->of(u);
  const UnitStep step(flat, gradient.left(), counts_->steps(), groups_.options,
                      groups_.of, factor);
  TESSERA_ASSIGN_OR_RETURN(const std::optional<CommFuture> updated,
                           early_->Step(u, step, factor, gradients));
  if (updated.has_value()) {
    change->updated = *updated;
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(
      change->working_written,
      StepHere(&flat, step, gradient.owned(), counts, &half_stepped_));
  return absl::OkStatus();
}

int64_t ShardedOptimizer::resident_bytes() const {
  int64_t bytes = states_->resident_bytes() + early_->resident_bytes();
  for (const auto& flat : flats_) {
    const auto& stream = flat->options().stream;
    if (stream != nullptr && flat->device().is_cpu()) {
      return bytes + stream->resident_bytes();
    }
  }
  return bytes;
}

}  // namespace tessera
