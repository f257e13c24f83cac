// Which stage an engine has, where its configuration says "auto".
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/memory/available_memory.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine_impl.h"
#include "engine/setup/stage_choice.h"

namespace tessera {
namespace {

FlatSize SizeOf(const Settings& settings, const FlatPlan& flat) {
  const FlatParameterOptions options =
      FlatParameterOptionsOf(settings, flat, /*stage=*/3);
  const auto bytes = [](at::ScalarType dtype) {
    return static_cast<int>(c10::elementSize(dtype));
  };
  const at::ScalarType working = ElementType(flat.working_dtype);
  const at::ScalarType own = ElementType(flat.dtype);
  const at::ScalarType master =
      at::isReducedFloatingType(own) ? at::kFloat : own;
  FlatSize size;
  for (const auto& p : flat.parameters) {
    size.numel += p.tensor.numel() * ElementsPerNumber(flat.dtype);
  }
  size.working_bytes = bytes(working);
  size.master_bytes = working == master ? 0 : bytes(master);
  size.reduce_bytes = bytes(options.reduce_dtype.value_or(working));
  size.state_bytes = bytes(master);
  size.trainable = flat.trainable;
  size.persistent = flat.persistent;
  return size;
}

// Bytes that one rank may use for model states: nine tenths of what is there,
// and there the ranks of a host share its memory.
absl::StatusOr<int64_t> MemoryOfRank(at::Device device) {
  if (!device.is_cpu()) {
    const auto [free, total] =
        at::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return static_cast<int64_t>(free / 10 * 9);
  }
  const World* world = World::Current();
  const int ranks = world == nullptr ? 1 : world->local_world_size();
  TESSERA_ASSIGN_OR_RETURN(const int64_t bytes, AvailableHostMemory());
  return bytes / 10 * 9 / ranks;
}

}  // namespace

absl::Status Engine::Impl::ChooseStage(absl::Span<const FlatPlan> flats) {
  if (!config_.zero_optimization().auto_stage()) {
    stage_ = config_.zero_optimization().stage();
    return absl::OkStatus();
  }
  int64_t memory = config_.sharding().memory_limit_bytes();
  absl::Status mine;
  if (memory == 0) {
    auto found = MemoryOfRank(flats[0].parameters[0].tensor.device());
    mine = found.status();
    if (found.ok()) memory = *found;
  }
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine, "zero_optimization.stage auto"));
  // The rank with the least decides for all.
  TESSERA_ASSIGN_OR_RETURN(
      const auto all, comm_->AllGatherStrings(absl::StrCat(memory),
                                              CommTag{"memory of the ranks"}));
  for (const std::string& theirs : all) {
    memory = std::min<int64_t>(memory, std::stoll(theirs));
  }
  StateOptions options;
  options.has_optimizer = settings_.adamw.has_value();
  options.accumulates = config_.gradient_accumulation_steps() > 1;
  options.accumulates_locally = settings_.accumulate_locally;
  std::vector<FlatSize> sizes;
  for (const auto& flat : flats) sizes.push_back(SizeOf(settings_, flat));
  TESSERA_ASSIGN_OR_RETURN(
      StageChoice choice,
      tessera::ChooseStage(sizes, settings_.shard_group_size, options, memory));
  stage_ = choice.stage;
  stage_reason_ = std::move(choice.reason);
  if (settings_.shard_group_size < comm_->world_size()) {
    absl::StrAppend(&stage_reason_, "; shard groups of ",
                    settings_.shard_group_size, " of ", comm_->world_size(),
                    " ranks");
  }
  if (comm_->rank() == 0) {
    TESSERA_LOG(INFO) << "zero_optimization.stage auto: " << stage_reason_;
  }
  return absl::OkStatus();
}

}  // namespace tessera
