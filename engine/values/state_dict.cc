#include "engine/values/state_dict.h"

#include <utility>

#include "ATen/ops/view_as_complex.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/device_ledger.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/model/exclusive_scope.h"
#include "engine/model/part_values.h"
#include "parallel/tensor/placed.h"
#include "sharding/flat/whole_values.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// One copy, wherever it was.
at::Tensor CopyOnHost(const at::Tensor& value) {
  return value.detach().to(at::kCPU, value.scalar_type(),
                           /*non_blocking=*/false, /*copy=*/true);
}

// By parameter, since a tied one has several names: masters, on the host.
using Values = absl::flat_hash_map<const void*, at::Tensor>;

// Gathers the masters of all flats, one at a time. COLLECTIVE.
absl::StatusOr<Values> GatherMasters(const ShardedModel& model, bool keeps) {
  Values values;
  for (const auto& flat : model.flats()) {
    TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                             flat->states().RaiseValue());
    TESSERA_ASSIGN_OR_RETURN(const FlatBuffer whole,
                             GatherWhole(*flat, value.View(), "masters"));
    TorchScope scope;
    const auto& parameters = flat->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      TESSERA_ASSIGN_OR_RETURN(
          const at::Tensor joined,
          JoinParts(model, parameters[i],
                    PlaceIn(whole, *flat, static_cast<int>(i))));
      if (!keeps) continue;
      values[parameters[i].of_module().unsafeGetTensorImpl()] =
          CopyOnHost(joined);
    }
  }
  return values;
}

// Under all names. What has no value there is the module's own: ignored
// parameters and buffers.
absl::Status AddAll(const torch::nn::Module& module, const Values& values,
                    StateDict* dict) {
  TorchScope scope;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    return CatchTorch(absl::StrCat("copy of '", name, "'"), [&] {
      const auto found = values.find(PartOrSelf(tensor).unsafeGetTensorImpl());
      dict->emplace_back(
          name, found != values.end() ? found->second : CopyOnHost(tensor));
    });
  };
  for (const auto& p : module.named_parameters()) {
    TESSERA_RETURN_IF_ERROR(add(p.key(), p.value()));
  }
  for (const auto& b : module.named_buffers()) {
    TESSERA_RETURN_IF_ERROR(add(b.key(), b.value()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StateDict> FullStateDict(UpdateGuard* guard, WriteChecks* writes,
                                        const StateDictOptions& options) {
  constexpr char kWhere[] = "Engine::FullStateDict";
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  // Whole copies of one unit after another are not counted by plans.
  const NoMemoryLimit unlimited(&LedgerOf(guard->model().device()));
  ExclusiveScope exclusive(guard, kWhere);
  TESSERA_RETURN_IF_ERROR(exclusive.Begin());
  const absl::Status equal = writes->CheckBeforeSave();
  if (!equal.ok()) return exclusive.Commit(equal);
  const bool keeps = !options.rank0_only || guard->comm()->rank() == 0;
  const absl::StatusOr<Values> values =
      CatchTorch(kWhere, [&] { return GatherMasters(guard->model(), keeps); });
  if (!values.ok()) return exclusive.Fail(values.status());
  // Nothing has changed, so an error of one rank ends nothing.
  TESSERA_RETURN_IF_ERROR(exclusive.Commit());
  StateDict dict;
  const absl::Status named =
      keeps ? AddAll(guard->model().module(), *values, &dict)
            : absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(guard->comm()->AgreeOk(named, kWhere));
  return dict;
}

absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict(
    UpdateGuard* guard) {
  constexpr char kWhere[] = "Engine::ShardedStateDict";
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  TESSERA_RETURN_IF_ERROR(CheckWhole(guard->model(), kWhere));
  ExclusiveScope exclusive(guard, kWhere);
  TESSERA_RETURN_IF_ERROR(exclusive.Begin());
  std::vector<ParameterShard> shards;
  const absl::Status copied = CatchTorch(kWhere, [&]() -> absl::Status {
    TorchScope scope;
    for (const auto& flat : guard->model().flats()) {
      TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                               flat->states().RaiseValue());
      for (const FlatParameter::Segment& segment : flat->segments()) {
        const FlatParameter::Parameter& p =
            flat->parameters()[static_cast<size_t>(segment.parameter)];
        const int64_t per = ElementsPerNumber(p.tensor.scalar_type());
        at::Tensor values = CopyOnHost(
            Slice(value.View(), {segment.range.begin - flat->owned().begin,
                                 segment.range.end - flat->owned().begin}));
        if (per == 2) values = at::view_as_complex(values.view({-1, 2}));
        shards.push_back({p.name, p.tensor.sizes().vec(),
                          p.tensor.strides().vec(),
                          (segment.range.begin - p.range.begin) / per, values});
      }
    }
    return absl::OkStatus();
  });
  // Nothing has changed, so an error of one rank ends nothing.
  TESSERA_RETURN_IF_ERROR(exclusive.Commit());
  TESSERA_RETURN_IF_ERROR(guard->comm()->AgreeOk(copied, kWhere));
  return shards;
}

}  // namespace tessera
