#include "engine/values/named_access.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/build/initial_sync.h"
#include "engine/checkpoint/state_table.h"
#include "engine/model/exclusive_scope.h"
#include "engine/model/part_values.h"
#include "optim/kernels/shaped_states.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/whole_values.h"

namespace tessera {

absl::StatusOr<ParameterRef> NamedAccess::Find(absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  return guard_->model().Find(name);
}

absl::StatusOr<at::Tensor> NamedAccess::Announced(
    absl::StatusOr<at::Tensor> result) {
  if (!result.ok()) guard_->comm()->Announce(result.status());
  return result;
}

absl::StatusOr<at::Tensor> NamedAccess::Gradient(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  return Announced(CatchTorch("Gradient", [&]() -> absl::StatusOr<at::Tensor> {
    TorchScope scope;
    optimization_.gradients()->Enter();
    TESSERA_ASSIGN_OR_RETURN(
        at::Tensor gradient,
        optimization_.gradients()->of(place.flat).Whole(place.parameter));
    const auto& part = ParameterAt(place).part;
    if (gradient.defined() || (part.has_value() && part->of_pipeline())) {
      TESSERA_ASSIGN_OR_RETURN(
          gradient, JoinParts(guard_->model(), ParameterAt(place), gradient));
    }
    const double inverse = 1 / optimization_.divisor();
    if (gradient.defined() && inverse != 1) gradient.mul_(inverse);
    return gradient;
  }));
}

absl::StatusOr<at::Tensor> NamedAccess::Parameter(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  const auto& flat = guard_->model().flats()[static_cast<size_t>(place.flat)];
  return CatchTorch("Parameter", [&] {
    at::Tensor copy;
    {
      PinSet pins;
      pins.Add(flat);
      TorchScope scope;
      copy = ParameterAt(place).tensor.clone();
      RemoveTag(copy);
    }
    return JoinParts(guard_->model(), ParameterAt(place), copy);
  });
}

absl::StatusOr<at::Tensor> NamedAccess::Master(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckNotSummoned());
  FlatParameter& flat = guard_->model().flat(place);
  ExclusiveScope scope(guard_, "Engine::Master");
  TESSERA_RETURN_IF_ERROR(scope.Enter(absl::OkStatus(), &flat));
  absl::StatusOr<at::Tensor> master =
      CatchTorch("Master", [&]() -> absl::StatusOr<at::Tensor> {
        TESSERA_RETURN_IF_ERROR(flat.PrepareUpdate());
        TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                                 flat.states().RaiseValue());
        return WholeCopy(place, value.View(), "masters");
      });
  if (!master.ok()) return scope.Fail(master.status());
  TESSERA_RETURN_IF_ERROR(scope.Commit());
  return master;
}

absl::StatusOr<at::Tensor> NamedAccess::WholeCopy(
    const ParameterRef& place, const at::Tensor& owned,
    absl::string_view what) const {
  const FlatParameter& flat = guard_->model().flat(place);
  TESSERA_ASSIGN_OR_RETURN(const FlatBuffer whole,
                           GatherWhole(flat, owned, what));
  TorchScope scope;
  return JoinParts(guard_->model(), ParameterAt(place),
                   PlaceIn(whole, flat, place.parameter).clone());
}

const FlatParameter::Parameter& NamedAccess::ParameterAt(
    const ParameterRef& place) const {
  return guard_->model()
      .flat(place)
      .parameters()[static_cast<size_t>(place.parameter)];
}

absl::StatusOr<ParameterRef> NamedAccess::AgreeOnValue(
    absl::string_view name, const at::Tensor& value, absl::string_view where,
    absl::string_view state) {
  const absl::StatusOr<ParameterRef> place = Find(name);
  std::string print;
  const absl::Status mine = CatchTorch(where, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(place.status());
    TESSERA_RETURN_IF_ERROR(guard_->life().CheckNotAveraged());
    std::string what = absl::StrCat("parameter '", name, "'");
    at::Tensor parameter = ParameterAt(*place).tensor;
    if (ParameterAt(*place).part.has_value()) {
      parameter = at::empty(WholeSizes(ParameterAt(*place)),
                            parameter.options().device(at::kMeta));
    }
    if (const at::Tensor shaped = ShapedState(*place, state);
        shaped.defined()) {
      parameter = shaped;
      what = absl::StrCat("state '", state, "' of ", what);
    }
    if (!value.defined() || value.sizes() != parameter.sizes() ||
        value.is_complex() != parameter.is_complex()) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, " is ", GeometryOf(parameter), ", and the value is ",
          value.defined() ? GeometryOf(value) : "undefined"));
    }
    TorchScope scope;
    const at::Tensor bytes = value.detach().cpu().contiguous();
    print = absl::StrCat(
        name, " ", GeometryOf(bytes), " ",
        absl::Hex(Fingerprint(bytes.const_data_ptr(),
                              static_cast<int64_t>(bytes.nbytes()))));
    return absl::OkStatus();
  });
  TESSERA_RETURN_IF_ERROR(guard_->comm()->AgreeOk(mine, where));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(print, absl::StrCat("value of ", where), guard_->comm()));
  return place;
}

absl::Status NamedAccess::SetMaster(absl::string_view name,
                                    const at::Tensor& value) {
  constexpr char kWhere[] = "Engine::SetMaster";
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place,
                           AgreeOnValue(name, value, kWhere));
  ExclusiveScope scope(guard_, kWhere);
  TESSERA_RETURN_IF_ERROR(scope.Begin());
  FlatParameter& flat = guard_->model().flat(place);
  const absl::Status written = CatchTorch(kWhere, [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(RaisedValue raised, flat.states().RaiseValue());
    TESSERA_RETURN_IF_ERROR(WriteOwned(flat, place.parameter,
                                       PartIn(value, ParameterAt(place)),
                                       raised.View()));
    TESSERA_RETURN_IF_ERROR(raised.Commit());
    std::vector<bool> changed(flat.parameters().size());
    changed[static_cast<size_t>(place.parameter)] = true;
    return flat.PublishOwned({.parameters = std::move(changed)});
  });
  if (!written.ok()) {
    guard_->FailTiers(written);
    return scope.Fail(written);
  }
  return scope.Commit();
}

absl::Status NamedAccess::SetGradient(absl::string_view name,
                                      const at::Tensor& value) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place,
                           AgreeOnValue(name, value, "Engine::SetGradient"));
  optimization_.gradients()->Enter();
  FlatGradient& gradient = optimization_.gradients()->of(place.flat);
  const auto& of = ParameterAt(place).part;
  const bool elsewhere = of.has_value() && of->stands_in();
  if (!elsewhere &&
      !gradient.has_gradient(static_cast<size_t>(place.parameter))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Engine::SetGradient: parameter '", name,
        "' has no gradient in this step; there must have been a Backward that "
        "gave it one"));
  }
  const at::Tensor part = PartIn(value, ParameterAt(place));
  // As Gradient divides. All ranks do the same, so their errors agree.
  return guard_->comm()->AgreeOk(
      CatchTorch("Engine::SetGradient",
                 [&]() -> absl::Status {
                   if (elsewhere) return absl::OkStatus();
                   TorchScope scope;
                   TESSERA_ASSIGN_OR_RETURN(Raised raised,
                                            gradient.RaiseToChange());
                   TESSERA_RETURN_IF_ERROR(
                       WriteOwned(gradient.flat(), place.parameter,
                                  optimization_.divisor() == 1
                                      ? part
                                      : part.to(gradient.flat().step_dtype()) *
                                            optimization_.divisor(),
                                  gradient.owned()));
                   return raised.Commit();
                 }),
      "Engine::SetGradient");
}

at::Tensor NamedAccess::ShapedState(const ParameterRef& place,
                                    absl::string_view state) const {
  if (optimization_.optimizer() == nullptr) return at::Tensor();
  return optimization_.optimizer()
      ->states()
      .factored(static_cast<size_t>(place.flat))
      .Find(static_cast<size_t>(place.parameter), state);
}

absl::StatusOr<NamedAccess::Owned> NamedAccess::OwnedState(
    absl::string_view name, const ParameterRef& place,
    absl::string_view state) {
  if (optimization_.optimizer() == nullptr) {
    return absl::FailedPreconditionError(
        "the engine has no optimizer: the configuration names none");
  }
  optimization_.gradients()->Enter();
  std::vector<std::string> names = optimization_.optimizer()->states().Names(
      static_cast<size_t>(place.flat));
  const auto it = std::find(names.begin(), names.end(), state);
  const size_t number = static_cast<size_t>(it - names.begin());
  const bool owned = number < names.size();
  for (const StateShape& shape :
       ShapedStatesOf(optimization_.optimizer()->states().FormulaOf(
                          static_cast<size_t>(place.flat)),
                      ParameterAt(place).tensor.sizes())) {
    names.push_back(shape.name);
  }
  if (std::find(names.begin(), names.end(), state) == names.end()) {
    return absl::NotFoundError(
        absl::StrCat("optimizer state '", state, "': expected ",
                     names.empty() ? "none: this optimizer keeps no states"
                                   : absl::StrJoin(names, " or ")));
  }
  std::vector<TieredBuffer>& states =
      guard_->model().flat(place).states().moments();
  if (!owned || states.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter '", name, "' has no optimizer state: it is frozen"));
  }
  return Owned{&states[number],
               optimization_.optimizer()->states().IsNonNegative(
                   static_cast<size_t>(place.flat), number)};
}

// With states of 8 bits, elements that share a block with the parameter are
// encoded again; they keep their bits, unless the block's largest element is in
// the parameter. What is behind the storage is 0.
absl::Status NamedAccess::WriteState(const ParameterRef& place,
                                     const at::Tensor& value,
                                     const Owned& state) {
  const FlatParameter& flat = guard_->model().flat(place);
  const at::Tensor part = PartIn(value, ParameterAt(place));
  const TieredBuffer& buffer = *state.buffer;
  if (!buffer.format().in_blocks()) {
    return WriteOwned(flat, place.parameter, part, buffer.View());
  }
  TorchScope scope;
  const at::Tensor numbers =
      StateNumbers(buffer.View(), buffer.numel(), state.non_negative);
  TESSERA_RETURN_IF_ERROR(WriteOwned(flat, place.parameter, part, numbers));
  const FlatParameter::Parameter& p =
      flat.parameters()[static_cast<size_t>(place.parameter)];
  const Range mine = Intersect(p.range, flat.owned());
  if (mine.empty()) return absl::OkStatus();
  const int64_t end =
      std::min(AlignUp(mine.end), flat.layout().slot(p.slot).end);
  const Range blocks = {
      mine.begin / kAlignElements * kAlignElements - flat.owned().begin,
      end - flat.owned().begin};
  SetStateNumbers(Slice(numbers, blocks), state.non_negative,
                  buffer.View(blocks));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> NamedAccess::State(absl::string_view name,
                                              absl::string_view state) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  if (const at::Tensor shaped = ShapedState(place, state); shaped.defined()) {
    optimization_.gradients()->Enter();
    return Announced(
        CatchTorch("OptimizerStateOf", [&]() -> absl::StatusOr<at::Tensor> {
          TESSERA_RETURN_IF_ERROR(
              guard_->model().flat(place).states().AwaitAllUpdates());
          TorchScope scope;
          return shaped.clone();
        }));
  }
  TESSERA_ASSIGN_OR_RETURN(const Owned owned, OwnedState(name, place, state));
  return Announced(
      CatchTorch("OptimizerStateOf", [&]() -> absl::StatusOr<at::Tensor> {
        TESSERA_RETURN_IF_ERROR(
            guard_->model().flat(place).states().AwaitAllUpdates());
        TESSERA_ASSIGN_OR_RETURN(const Raised raised, Raised::Of(owned.buffer));
        TorchScope scope;
        return WholeCopy(place,
                         StateNumbers(raised.View(), owned.buffer->numel(),
                                      owned.non_negative),
                         "optimizer states");
      }));
}

absl::Status NamedAccess::SetState(absl::string_view name,
                                   absl::string_view state,
                                   const at::Tensor& value) {
  TESSERA_ASSIGN_OR_RETURN(
      const ParameterRef place,
      AgreeOnValue(name, value, "Engine::SetOptimizerState", state));
  const at::Tensor shaped = ShapedState(place, state);
  Owned owned{};
  if (shaped.defined()) {
    optimization_.gradients()->Enter();
  } else {
    TESSERA_ASSIGN_OR_RETURN(owned, OwnedState(name, place, state));
  }
  guard_->BeforeChange();  // a save reads it yet
  FlatParameter& flat = guard_->model().flat(place);
  const absl::Status written =
      CatchTorch("Engine::SetOptimizerState", [&]() -> absl::Status {
        TESSERA_RETURN_IF_ERROR(flat.states().AwaitAllUpdates());
        optimization_.optimizer()->states().SetWritten(
            static_cast<size_t>(place.flat));
        if (shaped.defined()) {
          TorchScope scope;
          shaped.copy_(value);
          return absl::OkStatus();
        }
        TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(owned.buffer));
        TESSERA_RETURN_IF_ERROR(WriteState(place, value, owned));
        return raised.Commit();
      });
  if (!written.ok()) guard_->FailTiers(written);
  return guard_->comm()->AgreeOk(written, "Engine::SetOptimizerState");
}

}  // namespace tessera
