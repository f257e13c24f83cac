// Where an engine trains, and which stage it has where its configuration says
// "auto".
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/build/group_choice.h"
#include "engine/build/rank_memory.h"
#include "engine/build/stage_choice.h"
#include "engine/build/tiers.h"
#include "engine/engine_impl.h"
#include "optim/kernels/shaped_states.h"
#include "sharding/construct/construction.h"
#include "sharding/copy/flat_description.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

FlatSize SizeOf(const Settings& settings, const ParameterGroups& groups,
                const FlatPlan& flat) {
  const FlatParameterOptions options =
      FlatParameterOptionsOf(settings, flat, /*stage=*/3);
  const auto bytes = [](at::ScalarType dtype) {
    return static_cast<int>(c10::elementSize(dtype));
  };
  const at::ScalarType working = ElementType(flat.working_dtype);
  const at::ScalarType master = MasterDtypeOf(ElementType(flat.dtype), options);
  const int step_bytes = bytes(StepDtypeOf(master));
  FlatSize size;
  for (const auto& p : flat.parameters) {
    size.numel += p.tensor.numel() * ElementsPerNumber(flat.dtype);
  }
  size.working_bytes = bytes(working);
  size.master_bytes = working == master ? 0 : bytes(master);
  const at::ScalarType sums = options.reduce_dtype.value_or(working);
  const at::ScalarType gradient = GradientDtypeOf(master, options);
  size.reduce_bytes = bytes(sums);
  size.gradient_bytes = bytes(gradient);
  size.local_bytes = bytes(at::promoteTypes(sums, gradient));
  size.keeps_sums = sums == gradient;
  if (const OptimizerOptions* const optimizer = OptimizerOf(groups, flat)) {
    size.optimizer_block_bytes = StateBytesOf(*optimizer, step_bytes, 64);
    size.shaped_state_bytes =
        step_bytes * ShapedNumelOf(FormulaOf(*optimizer), flat.parameters);
  }
  size.trainable = flat.trainable;
  size.persistent = flat.persistent;
  return size;
}

// As stage 3 would have them, and what would stream through those on a disk.
struct FlatSizes {
  std::vector<FlatSize> flats;
  int64_t stream_bytes = 0;
};

FlatSizes SizesOf(const Settings& settings, const ParameterGroups& groups,
                  absl::Span<const FlatPlan> flats) {
  std::vector<FlatParameterOptions> options;
  FlatSizes sizes;
  for (const FlatPlan& flat : flats) {
    options.push_back(FlatParameterOptionsOf(settings, flat, /*stage=*/3));
    sizes.flats.push_back(SizeOf(settings, groups, flat));
  }
  const bool on_cpu =
      !flats.empty() && flats[0].parameters[0].tensor.device().is_cpu();
  const TierChoice choice = ChooseTiers(
      settings.offload, flats, settings.shard_group_size, on_cpu, &options);
  // Buffers for a device's states are on the host.
  if (choice.any() && on_cpu) {
    sizes.stream_bytes = StreamBytes(choice.stream) + choice.early_bytes;
  }
  for (size_t i = 0; i < flats.size(); ++i) {
    FlatSize& size = sizes.flats[i];
    size.states_elsewhere = options[i].states_tier != Tier::kMemory;
    size.parameters_elsewhere = options[i].parameters_tier != Tier::kMemory;
    size.gradients_elsewhere = options[i].gradients_tier != Tier::kMemory;
    size.at_all_stages = !flats[i].parameters[0].tensor.device().is_cpu();
  }
  return sizes;
}

StateOptions StatesOf(const Settings& settings, const proto::Config& config) {
  StateOptions options;
  options.has_optimizer = settings.optimizer.has_value();
  options.accumulates = config.gradient_accumulation_steps() > 1;
  options.accumulates_locally = settings.accumulate_locally;
  return options;
}

// What is to be in the memory of the CPU is there with a module on it. nvme
// counts as cpu below stage 3, and what is not sharded is not offloaded
// (config/validate_sharding.cc).
void TellWhatIsThere(const torch::nn::Module& module,
                     const proto::ZeroOptimization& zero) {
  const bool sharded = !zero.has_stage() || zero.stage() == 3;
  for (const at::Tensor& p : module.parameters()) {
    if (p.defined() && !p.device().is_cpu()) return;
  }
  const auto tell = [&](const std::string& device, absl::string_view key) {
    if (device != "cpu" && (device != "nvme" || sharded)) return;
    TESSERA_LOG_RANK0(INFO) << key
                            << ": the module is on the CPU, in whose memory "
                               "its states are anyway: nothing changes";
  };
  tell(zero.offload_optimizer().device(),
       "zero_optimization.offload_optimizer");
  if (!sharded) return;
  tell(zero.offload_param().device(), "zero_optimization.offload_param");
}

}  // namespace

absl::Status Engine::Impl::MoveTo(std::optional<at::Device> device) {
  for (const at::Tensor& p : model_.module().parameters()) {
    constructed_ |= IsEvictable(p);
    TESSERA_RETURN_IF_ERROR(CheckGroupOfEvictable(p, *model_.comm()));
  }
  if (device.has_value() && constructed_ && !device->is_cpu()) {
    return absl::UnimplementedError(absl::StrCat(
        "EngineOptions::device is ", device->str(),
        ", and ConstructSharded made the module, on the CPU, where it stays"));
  }
  if (device.has_value() && !constructed_) {
    TESSERA_RETURN_IF_ERROR(CatchTorch("EngineOptions::device",
                                       [&] { model_.module().to(*device); }));
  }
  TellWhatIsThere(model_.module(), config_.zero_optimization());
  return absl::OkStatus();
}

// The stage decides how units are cut into flats (nothing persists below stage
// 3), and the flats' sizes which stage fits. Which parameters persist does not
// depend on the stage, so the sizes are those of stage 3's flats, cut here for
// that alone.
absl::Status Engine::Impl::ChooseStage(absl::Span<const UnitPlan> units,
                                       const std::vector<bool>& trainable) {
  if (!config_.zero_optimization().auto_stage()) {
    model_.SetStage(config_.zero_optimization().stage());
    return absl::OkStatus();
  }
  FlatOptions as_stage_3 = settings_.flats;
  as_stage_3.sharded_parameters = true;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<FlatPlan> flats,
                           SplitFlats(units, trainable, as_stage_3));
  const World* const world = World::Current();
  TESSERA_ASSIGN_OR_RETURN(
      const int64_t memory,
      AgreeOnRankMemory(config_.sharding().memory_limit_bytes(),
                        flats[0].parameters[0].tensor.device(),
                        world == nullptr ? 1 : world->local_world_size(),
                        TakenOverBytes(model_.module()),
                        "zero_optimization.stage auto", model_.comm()));
  const FlatSizes sizes = SizesOf(settings_, groups_.groups(), flats);
  StateOptions states = StatesOf(settings_, config_);
  states.stream_bytes = sizes.stream_bytes;
  TESSERA_ASSIGN_OR_RETURN(
      StageChoice choice,
      tessera::ChooseStage(sizes.flats, settings_.shard_group_size, states,
                           memory));
  model_.SetStage(choice.stage);
  auto_reason_ = std::move(choice.reason);
  if (settings_.shard_group_size < model_.comm()->world_size()) {
    absl::StrAppend(&auto_reason_, "; shard groups of ",
                    settings_.shard_group_size, " of ",
                    model_.comm()->world_size(), " ranks");
  }
  if (model_.comm()->rank() == 0) {
    TESSERA_LOG(INFO) << "zero_optimization.stage auto: " << auto_reason_;
  }
  return absl::OkStatus();
}

// What may be kept whole must not be refused by the limit. From sizes and the
// configuration alone, so all ranks gather and free the same; what else the
// process holds is not known here.
void Engine::Impl::LimitLive(absl::Span<const FlatPlan> flats) {
  const int64_t limit = config_.sharding().memory_limit_bytes();
  if (limit == 0 || model_.stage() < 3) return;
  const int group_size = settings_.shard_group_size;
  const int reshard = settings_.reshard_group_size;
  FlatSizes sizes = SizesOf(settings_, groups_.groups(), flats);
  StateOptions states = StatesOf(settings_, config_);
  states.stream_bytes = sizes.stream_bytes;
  int64_t resharded_bytes = 0;
  for (size_t i = 0; i < flats.size(); ++i) {
    FlatSize& size = sizes.flats[i];
    size.numel = LayoutOf(flats[i].parameters, group_size).whole_numel();
    if (reshard > 0 && reshard < group_size && !size.persistent) {
      resharded_bytes += size.numel / reshard * size.working_bytes;
    }
  }
  const int64_t most =
      MaxLiveWithin(sizes.flats, group_size, states, resharded_bytes, limit);
  int64_t& max_live = settings_.schedule.max_live;
  if (most >= max_live) return;
  TESSERA_VLOG(engine, 1) << "sharding.memory_limit_bytes: at most " << most
                          << " elements are kept whole, instead of " << max_live
                          << " (stage3_max_live_parameters)";
  max_live = most;
}

}  // namespace tessera
