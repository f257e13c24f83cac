// What a program changes of parameter groups between steps.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "engine/parts/learning_rate.h"
#include "engine/setup/initial_sync.h"
#include "engine/training/trainer.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/option_names.h"

namespace tessera {

absl::StatusOr<size_t> Trainer::FindGroup(absl::string_view name) const {
  if (parts_->optimizer == nullptr) {
    return absl::FailedPreconditionError("the configuration has no optimizer");
  }
  const std::vector<std::string>& names = parts_->groups.names;
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
absl::Status Trainer::CheckOption(absl::string_view group,
                                  absl::string_view option,
                                  double value) const {
  TESSERA_ASSIGN_OR_RETURN(const size_t number, FindGroup(group));
  if (option == "lr" && parts_->lr_schedule != nullptr) {
    return absl::FailedPreconditionError(
        "the configuration has a scheduler, which sets the rate itself");
  }
  if (SetsMomentum(*parts_, step_, option)) {
    return absl::FailedPreconditionError(
        absl::StrCat("option '", option,
                     "': the configuration's scheduler has cycle_momentum and "
                     "sets it itself"));
  }
  OptimizerOptions changed = parts_->groups.options[number];
  if (option == "beta1" && RowOf(changed.algorithm).averages) {
    return absl::FailedPreconditionError(
        "option 'beta1': the average is found by it, so it stays what it was "
        "at the beginning");
  }
  return tessera::SetOption(option, value, &changed);
}

absl::Status Trainer::SetOption(absl::string_view group,
                                absl::string_view option, double value) {
  constexpr char kCall[] = "SetOption";
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  TESSERA_RETURN_IF_ERROR(
      parts_->comm->AgreeOk(CheckOption(group, option, value), kCall));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(absl::StrFormat("'%s' of '%s': %.17g", option, group, value),
                "option of SetOption", parts_->comm.get()));
  TESSERA_ASSIGN_OR_RETURN(const size_t number, FindGroup(group));
  return tessera::SetOption(option, value, &parts_->groups.options[number]);
}

absl::Status Trainer::SetFrozen(absl::string_view group, bool frozen) {
  constexpr char kCall[] = "SetFrozen";
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  const absl::StatusOr<size_t> found = FindGroup(group);
  absl::Status mine = found.status();
  if (mine.ok() && (has_backward_ || micro_steps_ > 0)) {
    mine = absl::FailedPreconditionError(
        "in the middle of a step; call it after Step or ZeroGrad");
  }
  TESSERA_RETURN_IF_ERROR(parts_->comm->AgreeOk(mine, kCall));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrCat("'", group, "': ", frozen),
                                    "group of SetFrozen", parts_->comm.get()));
  for (const auto& flat : parts_->flats) {
    for (const FlatParameter::Parameter& p : flat->parameters()) {
      const int of = parts_->groups.of[static_cast<size_t>(p.index)];
      if (static_cast<size_t>(of) == *found) {
        parts_->SetRequiresGrad(p.tensor, !frozen);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
