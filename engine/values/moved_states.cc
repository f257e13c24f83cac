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
#include "offload/shard_states.h"

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

// Whether Engine::Offload moves a state, and where the configuration has it.
struct Moves {
  bool moves = false;
  Tier configured = Tier::kMemory;
};

Moves MovesOf(ShardStates::State state, const OffloadStates& states,
              const FlatParameterOptions& options) {
  if (state == ShardStates::kWorking) {
    return {states.parameters, options.parameters_tier};
  }
  if (state == ShardStates::kMasters)
    return {states.masters, options.states_tier};
  return {state >= ShardStates::kMoments && states.optimizer,
          options.states_tier};
}

// move(buffer, configured), for what `states` says.
template <typename Move>
absl::Status MoveAll(const ShardedModel& model, const OffloadStates& states,
                     const Move& move) {
  return CatchTorch(kOffload, [&]() -> absl::Status {
    TorchScope scope;
    for (const auto& flat : model.flats()) {
      ShardStates& all = flat->states();
      const absl::Status moved =
          all.ForEach([&](ShardStates::State state, TieredBuffer& buffer) {
            const Moves of = MovesOf(state, states, flat->options());
            return of.moves && all.can_move(state)
                       ? move(&buffer, of.configured)
                       : absl::OkStatus();
          });
      all.SetChanged();
      TESSERA_RETURN_IF_ERROR(moved);
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status OffloadStatesOf(UpdateGuard* guard,
                             const OffloadOptions& configured,
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
    moved = MoveAll(guard->model(), states, [&](TieredBuffer* buffer, Tier) {
      return buffer->elsewhere() ? absl::OkStatus() : buffer->Move(*place);
    });
  }
  return scope.Commit(guard->comm()->AgreeOk(moved, kOffload));
}

absl::Status ReloadStatesOf(UpdateGuard* guard) {
  constexpr char kReload[] = "Engine::Reload";
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  ExclusiveScope scope(guard, kReload);
  TESSERA_RETURN_IF_ERROR(scope.Begin());
  const absl::Status moved = MoveAll(
      guard->model(), OffloadStates(), [](TieredBuffer* buffer, Tier before) {
        return before == Tier::kMemory ? buffer->Move({}) : absl::OkStatus();
      });
  return scope.Commit(guard->comm()->AgreeOk(moved, kReload));
}

}  // namespace tessera
