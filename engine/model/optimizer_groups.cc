#include "engine/model/optimizer_groups.h"

#include <cmath>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "engine/build/initial_sync.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/option_names.h"
#include "optim/schedule/plateau.h"
#include "parallel/tensor/placed.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// torch's cycles move the momentum of an optimizer that has no betas; of a
// program's own, which may read either, both.
void SetMomentum(const LrSchedule::Betas& betas, OptimizerOptions* options) {
  if (OptionOf("beta1", *options).ok()) {
    options->beta1 = betas.beta1;
    options->beta2 = betas.beta2.value_or(options->beta2);
    if (options->custom == nullptr) return;
  }
  if (!betas.beta2.has_value() && options->momentum > 0) {
    options->momentum = betas.beta1;
  }
}

}  // namespace

std::vector<OptimizerOptions> OptimizerGroups::Scheduled(
    int64_t steps_done) const {
  std::vector<OptimizerOptions> groups = groups_.options;
  if (schedule_ == nullptr) return groups;
  for (OptimizerOptions& options : groups) {
    options.lr = schedule_->Rate(steps_done, options.lr);
    const auto betas = schedule_->BetasAt(steps_done);
    if (betas.has_value()) SetMomentum(*betas, &options);
  }
  return groups;
}

// "beta1", "momentum".
bool OptimizerGroups::ScheduleSets(absl::string_view option,
                                   int64_t steps_done) const {
  if (schedule_ == nullptr) return false;
  const auto betas = schedule_->BetasAt(steps_done);
  if (!betas.has_value()) return false;
  return option == "beta1" ||
         option == (betas->beta2.has_value() ? "beta2" : "momentum");
}

absl::Status OptimizerGroups::SetLearningRate(double rate) {
  TESSERA_RETURN_IF_ERROR(life_->CheckOpen());
  absl::Status mine;
  if (!any() || schedule_ != nullptr) {
    mine = absl::FailedPreconditionError(absl::StrCat(
        "the configuration has ",
        !any() ? "no optimizer" : "a scheduler, which sets the rate itself"));
  } else if (!std::isfinite(rate) || rate < 0) {
    mine = absl::InvalidArgumentError(
        absl::StrCat("expected a finite number of at least 0, got ", rate));
  }
  TESSERA_RETURN_IF_ERROR(model_->comm()->AgreeOk(mine, "SetLearningRate"));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrFormat("%.17g", rate),
                                    "rate of SetLearningRate", model_->comm()));
  for (OptimizerOptions& group : groups_.options) group.lr = rate;
  return absl::OkStatus();
}

absl::Status OptimizerGroups::ReportMetric(double metric) {
  TESSERA_RETURN_IF_ERROR(life_->CheckOpen());
  absl::Status mine;
  if (plateau() == nullptr) {
    mine = absl::FailedPreconditionError(
        "the configuration has no scheduler that follows a metric "
        "(ReduceLROnPlateau)");
  }
  TESSERA_RETURN_IF_ERROR(model_->comm()->AgreeOk(mine, "ReportMetric"));
  // NaNs of any sign are the same.
  const std::string text =
      std::isnan(metric) ? "nan" : absl::StrFormat("%.17g", metric);
  TESSERA_RETURN_IF_ERROR(
      CheckSame(text, "metric of ReportMetric", model_->comm()));
  plateau()->Report(metric);
  return absl::OkStatus();
}

absl::StatusOr<size_t> OptimizerGroups::Find(absl::string_view name) const {
  if (!any()) {
    return absl::FailedPreconditionError("the configuration has no optimizer");
  }
  const std::vector<std::string>& names = groups_.names;
  for (size_t g = 0; g < names.size(); ++g) {
    if (names[g] == name) return g;
  }
  const std::string nearest = NearestName(name, names);
  return absl::NotFoundError(absl::StrCat(
      "there is no parameter group '", name, "'; there is '",
      absl::StrJoin(names, "', '"), "'",
      nearest.empty() ? "" : absl::StrCat("; did you mean '", nearest, "'?")));
}

// Whether SetOption can.
absl::Status OptimizerGroups::CheckOption(absl::string_view group,
                                          absl::string_view option,
                                          double value,
                                          int64_t steps_done) const {
  TESSERA_ASSIGN_OR_RETURN(const size_t number, Find(group));
  if (option == "lr" && schedule_ != nullptr) {
    return absl::FailedPreconditionError(
        "the configuration has a scheduler, which sets the rate itself");
  }
  if (ScheduleSets(option, steps_done)) {
    return absl::FailedPreconditionError(
        absl::StrCat("option '", option,
                     "': the configuration's scheduler has cycle_momentum and "
                     "sets it itself"));
  }
  OptimizerOptions changed = groups_.options[number];
  if (option == "beta1" && RowOf(changed.algorithm).averages) {
    return absl::FailedPreconditionError(
        "option 'beta1': the average is found by it, so it stays what it was "
        "at the beginning");
  }
  return tessera::SetOption(option, value, &changed);
}

absl::Status OptimizerGroups::SetOption(absl::string_view group,
                                        absl::string_view option, double value,
                                        int64_t steps_done) {
  constexpr char kCall[] = "SetOption";
  TESSERA_RETURN_IF_ERROR(life_->CheckOpen());
  TESSERA_RETURN_IF_ERROR(model_->comm()->AgreeOk(
      CheckOption(group, option, value, steps_done), kCall));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(absl::StrFormat("'%s' of '%s': %.17g", option, group, value),
                "option of SetOption", model_->comm()));
  TESSERA_ASSIGN_OR_RETURN(const size_t number, Find(group));
  return tessera::SetOption(option, value, &groups_.options[number]);
}

absl::Status OptimizerGroups::SetFrozen(absl::string_view group, bool frozen,
                                        bool within_step) {
  constexpr char kCall[] = "SetFrozen";
  TESSERA_RETURN_IF_ERROR(life_->CheckOpen());
  const absl::StatusOr<size_t> found = Find(group);
  absl::Status mine = found.status();
  if (mine.ok() && within_step) {
    mine = absl::FailedPreconditionError(
        "in the middle of a step; call it after Step or ZeroGrad");
  }
  TESSERA_RETURN_IF_ERROR(model_->comm()->AgreeOk(mine, kCall));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrCat("'", group, "': ", frozen),
                                    "group of SetFrozen", model_->comm()));
  // The module's own, which tell their parts.
  absl::flat_hash_map<const at::TensorImpl*, at::Tensor> own;
  for (const at::Tensor& p : model_->module().parameters()) {
    own[PartOrSelf(p).unsafeGetTensorImpl()] = p;
  }
  for (const auto& flat : model_->flats()) {
    for (const FlatParameter::Parameter& p : flat->parameters()) {
      const int of = groups_.of[static_cast<size_t>(p.index)];
      if (static_cast<size_t>(of) != *found) continue;
      const auto it = own.find(p.tensor.unsafeGetTensorImpl());
      SetRequiresGrad(it == own.end() ? p.tensor : it->second, !frozen);
      // The module has another tensor where a stand-in is trained.
      if (!p.of_module().is_same(p.tensor)) {
        SetRequiresGrad(p.of_module(), !frozen);
      }
    }
  }
  return absl::OkStatus();
}

void OptimizerGroups::SetRequiresGrad(const at::Tensor& parameter,
                                      bool requires_grad) {
  requires_grad_before_.try_emplace(parameter.unsafeGetTensorImpl(), parameter,
                                    parameter.requires_grad());
  parameter.requires_grad_(requires_grad);
}

void OptimizerGroups::RestoreRequiresGrad() {
  for (const auto& [impl, before] : requires_grad_before_) {
    before.first.requires_grad_(before.second);
  }
  requires_grad_before_.clear();
}

}  // namespace tessera
