#include "engine/values/moved_states.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/build/tiers.h"
#include "engine/model/exclusive_scope.h"

namespace tessera {
namespace {

constexpr char kOffload[] = "Engine::Offload";

absl::Status Check(const UpdateGuard& guard, const OffloadOptions& configured,
                   const OffloadStates& states) {
  const auto refuse = [](auto... words) {
    return absl::InvalidArgumentError(absl::StrCat(kOffload, ": ", words...));
  };
  if (states.device != "cpu" && states.device != "nvme") {
    return refuse("device: expected cpu or nvme, got \"", states.device, "\"");
  }
  if (states.parameters && guard.served() != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        kOffload,
        ": parameters: other ranks read the shards where they are; set "
        "sharding.served_gathers to \"off\", or leave parameters out"));
  }
  if (states.device == "cpu") return absl::OkStatus();
  if (!guard.model().device().is_cpu()) {
    return absl::UnimplementedError(
        absl::StrCat(kOffload, ": device: expected cpu for a module on ",
                     guard.model().device().str(), ", got nvme"));
  }
  const std::string& folder = configured.swap.folder;
  if (states.nvme_path.empty() && folder.empty()) {
    return refuse("nvme_path: expected a folder, got none");
  }
  // A rank has one file.
  if (guard.stream() != nullptr && !states.nvme_path.empty() &&
      states.nvme_path != folder) {
    return refuse("nvme_path: expected none, or the configuration's \"", folder,
                  "\", got \"", states.nvme_path, "\"");
  }
  return absl::OkStatus();
}

absl::StatusOr<TieredBuffer::Place> PlaceOf(const UpdateGuard& guard,
                                            const OffloadOptions& configured,
                                            const OffloadStates& states) {
  if (states.device == "cpu") return TieredBuffer::Place{Tier::kHost, nullptr};
  TieredBuffer::Place place{Tier::kDisk, nullptr};
  if (guard.stream() != nullptr) {  // what streams there takes the rest along
    // Masters, shard, the optimizer's states.
    const int64_t count = 2 + configured.optimizer_states;
    TESSERA_RETURN_IF_ERROR(
        guard.stream()->Reserve(count + (configured.gradients ? 1 : 0)));
    place.disk = guard.stream()->disk();
    return place;
  }
  SwapOptions swap = configured.swap;
  if (!states.nvme_path.empty()) swap.folder = states.nvme_path;
  TESSERA_ASSIGN_OR_RETURN(place.disk,
                           OpenSwapFile(swap, guard.comm()->rank(),
                                        absl::StrCat(kOffload, ": nvme_path")));
  return place;
}

// move(buffer, configured): of what `states` says of a unit, and where the
// configuration has it.
template <typename Move>
absl::Status MoveUnit(const ShardedModel& model, ShardedOptimizer* optimizer,
                      size_t u, const OffloadStates& states, const Move& move) {
  FlatParameter& flat = *model.flats()[u];
  const FlatParameterOptions& options = flat.options();
  TieredBuffer* const shard = flat.shard_buffer();
  TieredBuffer* const masters = flat.masters_buffer();
  if (states.parameters && shard != nullptr) {
    TESSERA_RETURN_IF_ERROR(move(shard, options.parameters));
  }
  if (states.masters && masters != nullptr && masters != shard) {
    TESSERA_RETURN_IF_ERROR(move(masters, options.states));
  }
  if (!states.optimizer || optimizer == nullptr) return absl::OkStatus();
  for (TieredBuffer& state : optimizer->states(static_cast<int>(u))) {
    TESSERA_RETURN_IF_ERROR(move(&state, options.states));
  }
  return absl::OkStatus();
}

template <typename Move>
absl::Status MoveAll(const ShardedModel& model, ShardedOptimizer* optimizer,
                     const OffloadStates& states, const Move& move) {
  return CatchTorch(kOffload, [&]() -> absl::Status {
    TorchScope scope;
    for (size_t u = 0; u < model.flats().size(); ++u) {
      const absl::Status moved = MoveUnit(model, optimizer, u, states, move);
      model.flats()[u]->SetMoved();
      TESSERA_RETURN_IF_ERROR(moved);
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status OffloadStatesOf(UpdateGuard* guard,
                             const OffloadOptions& configured,
                             ShardedOptimizer* optimizer,
                             const OffloadStates& states) {
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  ExclusiveScope scope(guard, kOffload);
  TESSERA_RETURN_IF_ERROR(scope.Begin(Check(*guard, configured, states)));
  // On the CPU that is where they are.
  if (states.device == "cpu" && guard->model().device().is_cpu()) {
    return scope.Commit();
  }
  const absl::StatusOr<TieredBuffer::Place> place =
      PlaceOf(*guard, configured, states);
  absl::Status moved = place.status();
  guard->NoteMoved();
  if (moved.ok()) {
    moved = MoveAll(
        guard->model(), optimizer, states, [&](TieredBuffer* buffer, Tier) {
          return buffer->elsewhere() ? absl::OkStatus() : buffer->Move(*place);
        });
  }
  return scope.Commit(guard->comm()->AgreeOk(moved, kOffload));
}

absl::Status ReloadStatesOf(UpdateGuard* guard, ShardedOptimizer* optimizer) {
  constexpr char kReload[] = "Engine::Reload";
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  ExclusiveScope scope(guard, kReload);
  TESSERA_RETURN_IF_ERROR(scope.Begin());
  const absl::Status moved = MoveAll(
      guard->model(), optimizer, OffloadStates(),
      [](TieredBuffer* buffer, Tier before) {
        return before == Tier::kMemory ? buffer->Move({}) : absl::OkStatus();
      });
  return scope.Commit(guard->comm()->AgreeOk(moved, kReload));
}

}  // namespace tessera
