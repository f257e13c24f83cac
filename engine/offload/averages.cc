#include "engine/offload/averages.h"

#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/parts/exclusive_scope.h"
#include "offload/shard_states.h"
#include "optim/algorithms/algorithm.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

bool HasOwnAverage(const EngineParts& parts) {
  return RowOf(parts.groups.options[0].algorithm).averages;
}

absl::Status Check(const EngineParts& parts, bool in) {
  if (parts.optimizer == nullptr ||
      (parts.groups.options[0].ema_decay == 0 && !HasOwnAverage(parts))) {
    return absl::FailedPreconditionError(
        "no averages are kept; set optimizer.params.ema_decay above 0, or "
        "train with AdamWScheduleFree");
  }
  if (parts.averages_in == in) {
    return absl::FailedPreconditionError(
        in ? "the parameters are their averages already"
           : "the parameters are not their averages");
  }
  return absl::OkStatus();
}

// Elements of [owned], and their group's options, of what has been stepped: a
// parameter that never was has no average.
template <typename Visit>
void VisitStepped(const EngineParts& parts, const FlatParameter& flat,
                  const Visit& visit) {
  for (const auto& segment : flat.segments()) {
    const auto& p = flat.parameters()[static_cast<size_t>(segment.parameter)];
    const auto index = static_cast<size_t>(p.index);
    if (parts.optimizer->counts().steps()[index] == 0) continue;
    visit(Range{segment.range.begin - flat.owned().begin,
                segment.range.end - flat.owned().begin},
          parts.groups.options[static_cast<size_t>(parts.groups.of[index])]);
  }
}

absl::Status Publish(FlatParameter* flat) {
  TESSERA_RETURN_IF_ERROR(flat->PublishOwned());
  for (const auto& p : flat->parameters()) {
    torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

// Room for the training points of all units that have states, where their
// masters are.
absl::Status MakeRoom(const EngineParts& parts) {
  const std::vector<uint8_t> has_state = parts.optimizer->states().has();
  for (size_t u = 0; u < parts.flats.size(); ++u) {
    if (has_state[u] == 0) continue;
    const FlatParameter& flat = *parts.flats[u];
    flat.states().Drop(ShardStates::kTrainingPoint);
    TESSERA_RETURN_IF_ERROR(flat.states().Add(
        ShardStates::kTrainingPoint, flat.states().value().format(),
        flat.options().PlaceOf(flat.options().states)));
  }
  return absl::OkStatus();
}

void DropRoom(const EngineParts& parts) {
  for (const auto& flat : parts.flats) {
    flat->states().Drop(ShardStates::kTrainingPoint);
  }
}

// x = y + (1 - 1 / beta1) * (z - y), each operation rounded once, so that it
// does not depend on shards. What it is made of cannot be found from it to the
// bit, so y is kept: the training point.
absl::Status EvaluateUnit(const EngineParts& parts, FlatParameter* flat) {
  ShardStates& states = flat->states();
  if (!states.has(ShardStates::kTrainingPoint)) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(Raised value, states.RaiseValue());
  TESSERA_ASSIGN_OR_RETURN(const Raised raised_z,
                           Raised::Of(&states.At(ShardStates::kMoments)));
  TESSERA_ASSIGN_OR_RETURN(Raised kept,
                           Raised::Of(&states.At(ShardStates::kTrainingPoint)));
  kept.View().copy_(value.View());
  VisitStepped(parts, *flat, [&](Range range, const OptimizerOptions& o) {
    const at::Tensor y = Slice(value.View(), range);
    const at::Tensor z = Slice(raised_z.View(), range);
    y.add_((z - y).mul_(1 - 1 / o.beta1));
  });
  TESSERA_RETURN_IF_ERROR(kept.Commit());
  TESSERA_RETURN_IF_ERROR(value.Commit());
  return Publish(flat);
}

absl::Status TrainUnit(FlatParameter* flat) {
  ShardStates& states = flat->states();
  if (!states.has(ShardStates::kTrainingPoint)) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(Raised value, states.RaiseValue());
  {
    TESSERA_ASSIGN_OR_RETURN(
        const Raised kept, Raised::Of(&states.At(ShardStates::kTrainingPoint)));
    value.View().copy_(kept.View());
  }
  states.Drop(ShardStates::kTrainingPoint);
  TESSERA_RETURN_IF_ERROR(value.Commit());
  return Publish(flat);
}

absl::Status SwapUnit(const EngineParts& parts, size_t u) {
  TieredBuffer* const average = parts.optimizer->states().average(u);
  if (average == nullptr) return absl::OkStatus();
  FlatParameter& flat = *parts.flats[u];
  TESSERA_ASSIGN_OR_RETURN(Raised value, flat.states().RaiseValue());
  TESSERA_ASSIGN_OR_RETURN(Raised averages, Raised::Of(average));
  VisitStepped(parts, flat, [&](Range range, const OptimizerOptions&) {
    const at::Tensor a = Slice(value.View(), range);
    const at::Tensor b = Slice(averages.View(), range);
    const at::Tensor before = a.clone();
    a.copy_(b);
    b.copy_(before);
  });
  TESSERA_RETURN_IF_ERROR(value.Commit());
  TESSERA_RETURN_IF_ERROR(averages.Commit());
  return Publish(&flat);
}

absl::Status Swap(const EngineParts& parts, size_t u, bool in) {
  if (!HasOwnAverage(parts)) return SwapUnit(parts, u);
  FlatParameter* const flat = parts.flats[u].get();
  return in ? EvaluateUnit(parts, flat) : TrainUnit(flat);
}

}  // namespace

absl::Status SwapAverages(EngineParts* parts, bool in) {
  const char* const where =
      in ? "Engine::SwapInAverages" : "Engine::SwapOutAverages";
  TESSERA_RETURN_IF_ERROR(parts->CheckOpen());
  ExclusiveScope scope(parts, where);
  absl::Status mine = Check(*parts, in);
  const bool keeps = mine.ok() && in && HasOwnAverage(*parts);
  if (keeps) mine = CatchTorch(where, [&] { return MakeRoom(*parts); });
  const absl::Status begun = scope.Begin(mine);
  if (!begun.ok()) {
    if (keeps) DropRoom(*parts);
    return begun;
  }
  const absl::Status swapped = CatchTorch(where, [&]() -> absl::Status {
    TorchScope torch_scope;
    for (size_t u = 0; u < parts->flats.size(); ++u) {
      TESSERA_RETURN_IF_ERROR(Swap(*parts, u, in));
    }
    return absl::OkStatus();
  });
  if (!swapped.ok()) {
    parts->Lose(swapped);
    return scope.Fail(swapped);
  }
  parts->averages_in = in;
  return scope.Commit();
}

}  // namespace tessera
