#include "engine/values/averages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/model/exclusive_scope.h"
#include "offload/shard_states.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

bool HasOwnAverage(const OptimizerGroups& groups) {
  return RowOf(groups.groups().options[0].algorithm).averages;
}

void DropRoom(const ShardedModel& model) {
  for (const auto& flat : model.flats()) {
    flat->states().Drop(ShardStates::kTrainingPoint);
  }
}

// Exchanges unit by unit.
class Swapping {
 public:
  Swapping(const ShardedModel& model, const Optimization& optimization,
           const OptimizerGroups& groups)
      : model_(model), optimization_(optimization), groups_(groups) {}

  absl::Status Check(bool averaged, bool in) const {
    if (optimization_.optimizer() == nullptr ||
        (groups_.groups().options[0].ema_decay == 0 &&
         !HasOwnAverage(groups_))) {
      return absl::FailedPreconditionError(
          "no averages are kept; set optimizer.params.ema_decay above 0, or "
          "train with AdamWScheduleFree");
    }
    if (averaged == in) {
      return absl::FailedPreconditionError(
          in ? "the parameters are their averages already"
             : "the parameters are not their averages");
    }
    return absl::OkStatus();
  }

  // Makes room for the training points of all units that have states, where
  // their masters are.
  absl::Status MakeRoom() const {
    const std::vector<uint8_t> has_state =
        optimization_.optimizer()->states().has();
    for (size_t u = 0; u < model_.flats().size(); ++u) {
      if (has_state[u] == 0) continue;
      const FlatParameter& flat = *model_.flats()[u];
      flat.states().Drop(ShardStates::kTrainingPoint);
      TESSERA_RETURN_IF_ERROR(flat.states().Add(
          ShardStates::kTrainingPoint, flat.states().value_dtype(),
          flat.options().PlaceOf(flat.options().states_tier)));
    }
    return absl::OkStatus();
  }

  absl::Status SwapUnit(size_t u, bool in) const {
    FlatParameter* const flat = model_.flats()[u].get();
    if (!HasOwnAverage(groups_)) return Exchange(u, flat);
    return in ? Evaluate(flat) : Train(flat);
  }

 private:
  // Visits the elements of [owned], with their group's options, of what has
  // been stepped: a parameter that never was has no average.
  template <typename Visit>
  void VisitStepped(const FlatParameter& flat, const Visit& visit) const {
    for (const auto& segment : flat.segments()) {
      const auto& p = flat.parameters()[static_cast<size_t>(segment.parameter)];
      const auto index = static_cast<size_t>(p.index);
      if (optimization_.optimizer()->counts().steps()[index] == 0) continue;
      visit(Range{segment.range.begin - flat.owned().begin,
                  segment.range.end - flat.owned().begin},
            groups_.groups()
                .options[static_cast<size_t>(groups_.groups().of[index])]);
    }
  }

  // x = y + (1 - 1 / beta1) * (z - y), each operation rounded once, so that it
  // does not depend on shards. What it is made of cannot be found from it to
  // the bit, so y is kept: the training point.
  absl::Status Evaluate(FlatParameter* flat) const {
    ShardStates& states = flat->states();
    if (!states.has(ShardStates::kTrainingPoint)) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(RaisedValue value, states.RaiseValue());
    TESSERA_ASSIGN_OR_RETURN(const Raised raised_z,
                             Raised::Of(&states.At(ShardStates::kMoments)));
    TESSERA_ASSIGN_OR_RETURN(
        Raised kept, Raised::Of(&states.At(ShardStates::kTrainingPoint)));
    kept.View().copy_(value.View());
    VisitStepped(*flat, [&](Range range, const OptimizerOptions& o) {
      const at::Tensor y = Slice(value.View(), range);
      const at::Tensor z = Slice(raised_z.View(), range);
      y.add_((z - y).mul_(1 - 1 / o.beta1));
    });
    TESSERA_RETURN_IF_ERROR(kept.Commit());
    TESSERA_RETURN_IF_ERROR(value.Commit());
    return flat->PublishOwned();
  }

  absl::Status Train(FlatParameter* flat) const {
    ShardStates& states = flat->states();
    if (!states.has(ShardStates::kTrainingPoint)) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(RaisedValue value, states.RaiseValue());
    {
      TESSERA_ASSIGN_OR_RETURN(
          const Raised kept,
          Raised::Of(&states.At(ShardStates::kTrainingPoint)));
      value.View().copy_(kept.View());
    }
    states.Drop(ShardStates::kTrainingPoint);
    TESSERA_RETURN_IF_ERROR(value.Commit());
    return flat->PublishOwned();
  }

  absl::Status Exchange(size_t u, FlatParameter* flat) const {
    TieredBuffer* const average =
        optimization_.optimizer()->states().average(u);
    if (average == nullptr) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(RaisedValue value, flat->states().RaiseValue());
    TESSERA_ASSIGN_OR_RETURN(Raised averages, Raised::Of(average));
    VisitStepped(*flat, [&](Range range, const OptimizerOptions&) {
      const at::Tensor a = Slice(value.View(), range);
      const at::Tensor b = Slice(averages.View(), range);
      const at::Tensor before = a.clone();
      a.copy_(b);
      b.copy_(before);
    });
    TESSERA_RETURN_IF_ERROR(value.Commit());
    TESSERA_RETURN_IF_ERROR(averages.Commit());
    return flat->PublishOwned();
  }

  const ShardedModel& model_;
  const Optimization& optimization_;
  const OptimizerGroups& groups_;
};

}  // namespace

absl::Status SwapAverages(UpdateGuard* guard, const Optimization& optimization,
                          const OptimizerGroups& groups, bool in) {
  const char* const where =
      in ? "Engine::SwapInAverages" : "Engine::SwapOutAverages";
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  ExclusiveScope scope(guard, where);
  const Swapping swapping(guard->model(), optimization, groups);
  absl::Status mine = swapping.Check(guard->life().averaged(), in);
  const bool keeps = mine.ok() && in && HasOwnAverage(groups);
  if (keeps) mine = CatchTorch(where, [&] { return swapping.MakeRoom(); });
  const absl::Status begun = scope.Begin(mine);
  if (!begun.ok()) {
    if (keeps) DropRoom(guard->model());
    return begun;
  }
  const absl::Status swapped = CatchTorch(where, [&]() -> absl::Status {
    TorchScope torch_scope;
    for (size_t u = 0; u < guard->model().flats().size(); ++u) {
      TESSERA_RETURN_IF_ERROR(swapping.SwapUnit(u, in));
    }
    return absl::OkStatus();
  });
  if (!swapped.ok()) {
    guard->life().Lose(swapped);
    return scope.Fail(swapped);
  }
  guard->life().SetAveraged(in);
  return scope.Commit();
}

}  // namespace tessera
