// Which stage an engine has, where its configuration says "auto".
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/memory/available_memory.h"
#include "base/status.h"
#include "comm/all_gather_values.h"
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

// The stage decides how units are cut into flats (nothing persists below stage
// 3), and the flats' sizes which stage fits. Which parameters persist does not
// depend on the stage, so the sizes are those of stage 3's flats, cut here for
// that alone.
absl::Status Engine::Impl::ChooseStage(absl::Span<const UnitPlan> units,
                                       const std::vector<bool>& trainable) {
  if (!parts_->config.zero_optimization().auto_stage()) {
    parts_->stage = parts_->config.zero_optimization().stage();
    return absl::OkStatus();
  }
  FlatOptions as_stage_3 = parts_->settings.flats;
  as_stage_3.sharded_parameters = true;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<FlatPlan> flats,
                           SplitFlats(units, trainable, as_stage_3));
  int64_t memory = parts_->config.sharding().memory_limit_bytes();
  absl::Status mine;
  if (memory == 0) {
    auto found = MemoryOfRank(flats[0].parameters[0].tensor.device());
    mine = found.status();
    if (found.ok()) memory = *found;
  }
  TESSERA_RETURN_IF_ERROR(
      parts_->comm->AgreeOk(mine, "zero_optimization.stage auto"));
  // The rank with the least decides for all.
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           AllGatherValue(parts_->comm.get(), memory,
                                          CommTag{"memory of the ranks"}));
  memory = *std::min_element(all.begin(), all.end());
  StateOptions options;
  options.has_optimizer = parts_->settings.adamw.has_value();
  options.accumulates = parts_->config.gradient_accumulation_steps() > 1;
  options.accumulates_locally = parts_->settings.accumulate_locally;
  std::vector<FlatSize> sizes;
  for (const auto& flat : flats) {
    sizes.push_back(SizeOf(parts_->settings, flat));
  }
  TESSERA_ASSIGN_OR_RETURN(
      StageChoice choice,
      tessera::ChooseStage(sizes, parts_->settings.shard_group_size, options,
                           memory));
  parts_->stage = choice.stage;
  stage_reason_ = std::move(choice.reason);
  if (parts_->settings.shard_group_size < parts_->comm->world_size()) {
    absl::StrAppend(&stage_reason_, "; shard groups of ",
                    parts_->settings.shard_group_size, " of ",
                    parts_->comm->world_size(), " ranks");
  }
  if (parts_->comm->rank() == 0) {
    TESSERA_LOG(INFO) << "zero_optimization.stage auto: " << stage_reason_;
  }
  return absl::OkStatus();
}

}  // namespace tessera
