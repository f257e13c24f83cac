// Access by name: parameters, masters, gradients and optimizer states, whole.
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/view_as_complex.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/engine_impl.h"
#include "engine/setup/initial_sync.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/whole_values.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

// The others may be in the collective that this rank did not come to.
absl::StatusOr<at::Tensor> Engine::Impl::Announced(
    absl::StatusOr<at::Tensor> result) {
  if (!result.ok()) comm_->Announce(result.status());
  return result;
}

absl::StatusOr<at::Tensor> Engine::Impl::Gradient(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  return Announced(CatchTorch("Gradient", [&]() -> absl::StatusOr<at::Tensor> {
    TorchScope scope;
    TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient,
                             gradients_->of(place.flat).Whole(place.parameter));
    const double inverse = 1 / divisor();
    if (gradient.defined() && inverse != 1) gradient.mul_(inverse);
    return gradient;
  }));
}

absl::StatusOr<at::Tensor> Engine::Impl::Parameter(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  const auto& flat = flats_[static_cast<size_t>(place.flat)];
  return CatchTorch("Parameter", [&] {
    PinSet pins;
    pins.Add(flat);
    TorchScope scope;
    at::Tensor copy =
        flat->parameters()[static_cast<size_t>(place.parameter)].tensor.clone();
    RemoveTag(copy);
    return copy;
  });
}

absl::StatusOr<at::Tensor> Engine::Impl::Master(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  TESSERA_RETURN_IF_ERROR(CheckNotSummoned());
  const auto& flat = flats_[static_cast<size_t>(place.flat)];
  TESSERA_RETURN_IF_ERROR(
      EnterUpdate(absl::OkStatus(), "Engine::Master", flat.get()));
  TESSERA_ASSIGN_OR_RETURN(
      at::Tensor master,
      Announced(CatchTorch("Master", [&]() -> absl::StatusOr<at::Tensor> {
        TESSERA_RETURN_IF_ERROR(flat->PrepareUpdate());
        return WholeCopy(place, flat->masters(), "masters");
      })));
  TESSERA_RETURN_IF_ERROR(EndUpdate());
  return master;
}

absl::StatusOr<at::Tensor> Engine::Impl::WholeCopy(
    const ParameterRef& place, const at::Tensor& owned,
    absl::string_view what) const {
  const FlatParameter& flat = *flats_[static_cast<size_t>(place.flat)];
  TESSERA_ASSIGN_OR_RETURN(const FlatBuffer whole,
                           GatherWhole(flat, owned, what));
  TorchScope scope;
  return PlaceIn(whole, flat, place.parameter).clone();
}

// Where the parameter is: that all ranks know it, that `value` fits it, and is
// the same on all. COLLECTIVE.
absl::StatusOr<Engine::Impl::ParameterRef> Engine::Impl::AgreeOnValue(
    absl::string_view name, const at::Tensor& value, absl::string_view where) {
  const absl::StatusOr<ParameterRef> place = Find(name);
  std::string print;
  const absl::Status mine = CatchTorch(where, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(place.status());
    const auto& parameters =
        flats_[static_cast<size_t>(place->flat)]->parameters();
    const at::Tensor& parameter =
        parameters[static_cast<size_t>(place->parameter)].tensor;
    if (!value.defined() || value.sizes() != parameter.sizes() ||
        value.is_complex() != parameter.is_complex()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", name, "' is ", GeometryOf(parameter),
                       ", and the value is ",
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
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine, where));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(print, absl::StrCat("value of ", where), comm_.get()));
  return place;
}

absl::Status Engine::Impl::SetMaster(absl::string_view name,
                                     const at::Tensor& value) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place,
                           AgreeOnValue(name, value, "Engine::SetMaster"));
  TESSERA_RETURN_IF_ERROR(AgreeOnUpdate(absl::OkStatus(), "Engine::SetMaster"));
  FlatParameter& flat = *flats_[static_cast<size_t>(place.flat)];
  const absl::Status written =
      CatchTorch("Engine::SetMaster", [&]() -> absl::Status {
        TESSERA_RETURN_IF_ERROR(
            WriteOwned(flat, place.parameter, value, flat.masters()));
        return flat.PublishOwned();
      });
  if (!written.ok()) return FailUpdate(written);
  const auto& parameters = flat.parameters();
  torch::autograd::impl::bump_version(
      parameters[static_cast<size_t>(place.parameter)].tensor);
  return EndUpdate();
}

absl::Status Engine::Impl::SetGradient(absl::string_view name,
                                       const at::Tensor& value) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place,
                           AgreeOnValue(name, value, "Engine::SetGradient"));
  const FlatGradient& gradient = gradients_->of(place.flat);
  if (!gradient.has_gradient(static_cast<size_t>(place.parameter))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Engine::SetGradient: parameter '", name,
        "' has no gradient in this step; there must have been a Backward that "
        "gave it one"));
  }
  // As Gradient divides. All ranks do the same, so their errors agree.
  return comm_->AgreeOk(
      CatchTorch("Engine::SetGradient",
                 [&] {
                   TorchScope scope;
                   return WriteOwned(
                       gradient.flat(), place.parameter,
                       divisor() == 1
                           ? value
                           : value.to(gradient.owned().dtype()) * divisor(),
                       gradient.owned());
                 }),
      "Engine::SetGradient");
}

// This rank's part of one state, [owned]; the others have theirs.
absl::StatusOr<at::Tensor> Engine::Impl::OwnedState(absl::string_view name,
                                                    const ParameterRef& place,
                                                    OptimizerState which) {
  if (optimizer_ == nullptr) {
    return absl::FailedPreconditionError(
        "the engine has no optimizer: the configuration names none");
  }
  FlatBuffer& state = which == OptimizerState::kExpAvg
                          ? optimizer_->exp_avg(place.flat)
                          : optimizer_->exp_avg_sq(place.flat);
  if (!state.defined()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter '", name, "' has no optimizer state: it is frozen"));
  }
  return state.View();
}

absl::StatusOr<at::Tensor> Engine::Impl::GetState(absl::string_view name,
                                                  OptimizerState which) {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(name));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor owned,
                           OwnedState(name, place, which));
  return Announced(CatchTorch("OptimizerStateOf", [&] {
    return WholeCopy(place, owned, "optimizer states");
  }));
}

absl::Status Engine::Impl::SetState(absl::string_view name,
                                    OptimizerState which,
                                    const at::Tensor& value) {
  TESSERA_ASSIGN_OR_RETURN(
      const ParameterRef place,
      AgreeOnValue(name, value, "Engine::SetOptimizerState"));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor owned,
                           OwnedState(name, place, which));
  return comm_->AgreeOk(
      CatchTorch("Engine::SetOptimizerState",
                 [&] {
                   return WriteOwned(*flats_[static_cast<size_t>(place.flat)],
                                     place.parameter, value, owned);
                 }),
      "Engine::SetOptimizerState");
}

// One copy, wherever it was.
static at::Tensor CopyOnHost(const at::Tensor& value) {
  return value.detach().to(at::kCPU, value.scalar_type(),
                           /*non_blocking=*/false, /*copy=*/true);
}

absl::StatusOr<StateDict> Engine::Impl::FullStateDict(
    const StateDictOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(
      AgreeOnUpdate(absl::OkStatus(), "Engine::FullStateDict"));
  const absl::Status equal = CheckReplicas();
  if (!equal.ok()) {
    TESSERA_RETURN_IF_ERROR(EndUpdate());
    return equal;
  }
  const bool keeps = !options.rank0_only || comm_->rank() == 0;
  // By parameter: a tied one has several names.
  absl::flat_hash_map<const void*, at::Tensor> values;
  const absl::Status gathered =
      CatchTorch("Engine::FullStateDict", [&]() -> absl::Status {
        for (const auto& flat : flats_) {
          TESSERA_ASSIGN_OR_RETURN(
              const FlatBuffer whole,
              GatherWhole(*flat, flat->masters(), "masters"));
          TorchScope scope;
          const auto& parameters = flat->parameters();
          for (size_t i = 0; keeps && i < parameters.size(); ++i) {
            values[parameters[i].tensor.unsafeGetTensorImpl()] =
                CopyOnHost(PlaceIn(whole, *flat, static_cast<int>(i)));
          }
        }
        return absl::OkStatus();
      });
  if (!gathered.ok()) return FailUpdate(gathered);
  TESSERA_RETURN_IF_ERROR(EndUpdate());
  StateDict dict;
  if (!keeps) return dict;
  TorchScope scope;
  for (const auto& p : module_->named_parameters()) {
    const auto found = values.find(p.value().unsafeGetTensorImpl());
    // Ignored parameters are the module's own.
    dict.emplace_back(
        p.key(), found != values.end() ? found->second : CopyOnHost(p.value()));
  }
  for (const auto& b : module_->named_buffers()) {
    dict.emplace_back(b.key(), CopyOnHost(b.value()));
  }
  return dict;
}

absl::StatusOr<std::vector<ParameterShard>> Engine::Impl::ShardedStateDict() {
  constexpr char kWhere[] = "Engine::ShardedStateDict";
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(AgreeOnUpdate(absl::OkStatus(), kWhere));
  std::vector<ParameterShard> shards;
  const absl::Status copied = CatchTorch(kWhere, [&] {
    TorchScope scope;
    for (const auto& flat : flats_) {
      const at::Tensor masters = flat->masters();
      for (const FlatParameter::Segment& segment : flat->segments()) {
        const FlatParameter::Parameter& p =
            flat->parameters()[static_cast<size_t>(segment.parameter)];
        const int64_t per = ElementsPerNumber(p.tensor.scalar_type());
        at::Tensor values = CopyOnHost(
            Slice(masters, {segment.range.begin - flat->owned().begin,
                           segment.range.end - flat->owned().begin}));
        if (per == 2) values = at::view_as_complex(values.view({-1, 2}));
        shards.push_back({p.name, p.tensor.sizes().vec(),
                          p.tensor.strides().vec(),
                          (segment.range.begin - p.range.begin) / per, values});
      }
    }
  });
  // Nothing has changed, so an error of one rank ends nothing.
  TESSERA_RETURN_IF_ERROR(EndUpdate());
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(copied, kWhere));
  return shards;
}

}  // namespace tessera
