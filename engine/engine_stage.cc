// Where an engine trains, which layers it divides, and which stage it has where
// its configuration says "auto".
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "config/config.h"
#include "engine/auto_config.h"
#include "engine/build/initial_sync.h"
#include "engine/divide/tensor_parts.h"
#include "engine/engine_impl.h"
#include "engine/plan/replay/planned_flat.h"
#include "engine/plan/stage_choice.h"
#include "sharding/construct/construction.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kKey[] = "tensor_parallel.autotp_size";

StateOptions StatesOf(const Settings& settings, const proto::Config& config) {
  StateOptions options;
  options.has_optimizer = settings.optimizer.has_value();
  options.accumulates = config.gradient_accumulation_steps() > 1;
  options.accumulates_locally = config.sharding().accumulation() == "local";
  options.uses_up = settings.gradients.uses_up;
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

// After the ranks' modules were found to be equal, since parts are not.
absl::Status Engine::Impl::DivideLayers(const EngineOptions& options,
                                        std::vector<UnitPlan>* units) {
  if (!model_.has_cuts()) return absl::OkStatus();
  absl::StatusOr<std::vector<TensorCut>> cuts =
      CatchTorch(kKey, [&]() -> absl::StatusOr<std::vector<TensorCut>> {
        if (!constructed_) {
          return ChooseTensorCuts(config_, settings_, groups_.groups(), options,
                                  model_.module());
        }
        return absl::UnimplementedError(absl::StrCat(
            kKey, " ", TensorRanksOf(config_),
            ": ConstructSharded made the module, and its parameters are not "
            "whole on any rank: construct it as usual"));
      });
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(cuts.status(), kKey));
  const std::string list =
      absl::StrJoin(*cuts, ", ", [](std::string* text, const auto& cut) {
        absl::StrAppend(text, cut.parameter, " along ", cut.dim, " in ",
                        cut.groups);
      });
  TESSERA_RETURN_IF_ERROR(
      CheckSame(list, "list of divided parameters", model_.comm()));
  absl::Status divided = parts_.Divide(*cuts, model_.tensor(), units);
  if (!divided.ok() && !parts_.empty()) {
    divided = absl::Status(divided.code(),
                           absl::StrCat(divided.message(),
                                        "; some of the module is divided: "
                                        "construct it again"));
  }
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(divided, kKey));
  cuts_ = *std::move(cuts);
  TESSERA_LOG_RANK0(INFO) << "tensor parallelism over "
                          << TensorRanksOf(config_)
                          << " ranks: " << cuts_.size()
                          << " parameters are divided";
  return absl::OkStatus();
}

absl::Status Engine::Impl::DivideSequences(std::vector<UnitPlan>* units) {
  if (!model_.has_sequences()) return absl::OkStatus();
  const int ranks = SequenceRanksOf(config_);
  absl::Status copied;
  if (constructed_) {
    copied = absl::UnimplementedError(absl::StrCat(
        "sequence_parallel_size ", ranks,
        ": ConstructSharded made the module: construct it as usual"));
  } else {
    copied = parts_.Copy(model_.module(), model_.sequence(), units);
    model_.SetPartGroup(parts_.group());
  }
  TESSERA_RETURN_IF_ERROR(
      model_.comm()->AgreeOk(copied, "sequence_parallel_size"));
  TESSERA_LOG_RANK0(INFO) << "sequence parallelism over " << ranks
                          << " ranks, of what DivideSequence is called on";
  return absl::OkStatus();
}

// Says how long stages wait at least: a backward takes twice a forward.
void Engine::Impl::LogStages(const PipelinePlan& plan) const {
  PipelineSpeeds speeds;
  speeds.schedule = ScheduleOf(config_);
  speeds.micro_batches =
      static_cast<int>(config_.gradient_accumulation_steps());
  for (const double share : plan.share) {
    speeds.stages.push_back({share / 3, share * 2 / 3});
  }
  double idle = 0;
  const PipelineTimes times = PipelineTimesOf(speeds);
  for (const PipelineTimes::Stage& stage : times.stages) {
    idle += stage.idle_share / static_cast<double>(times.stages.size());
  }
  TESSERA_LOG_RANK0(INFO) << absl::StrFormat(
      "pipeline of %d stages: %s; with %d micro-batches they wait for each "
      "other for about %.0f %% of a step",
      plan.share.size(), plan.reason, speeds.micro_batches, 100 * idle);
}

// As DivideLayers, of a pipeline.
absl::Status Engine::Impl::MakeStages(const EngineOptions& options,
                                      std::vector<UnitPlan>* units) {
  if (!model_.has_stages()) return absl::OkStatus();
  constexpr char kStages[] = "pipeline.stages";
  absl::StatusOr<PipelinePlan> plan =
      CatchTorch(kStages, [&]() -> absl::StatusOr<PipelinePlan> {
        if (!constructed_) {
          return ChooseStages(config_, settings_, groups_.groups(), options,
                              model_.module(), *units);
        }
        return absl::UnimplementedError(absl::StrCat(
            kStages, " ", model_.mesh().size(kPp),
            ": ConstructSharded made the module, and its parameters are not "
            "whole on any rank: construct it as usual"));
      });
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(plan.status(), kStages));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrJoin(plan->stage, " "),
                                    "list of stages", model_.comm()));
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(
      stages_.Divide(plan->stage, model_.pipeline(),
                     settings_.flats.working_dtype, units),
      kStages));
  LogStages(*plan);
  return absl::OkStatus();
}

absl::Status Engine::Impl::ChooseStage(absl::Span<const UnitPlan> units,
                                       const std::vector<bool>& trainable) {
  if (!config_.zero_optimization().auto_stage()) {
    model_.SetStage(config_.zero_optimization().stage());
    return absl::OkStatus();
  }
  const at::Device device = units[0].parameters[0].tensor.device();
  TESSERA_ASSIGN_OR_RETURN(
      const int64_t memory,
      AgreeOnMemory(model_.module(), config_, device,
                    "zero_optimization.stage auto", model_.comm()));
  std::vector<int64_t> bytes;
  for (int stage = 0; stage <= 3; ++stage) {
    FlatOptions options = settings_.flats;
    options.sharded_parameters = stage == 3;
    TESSERA_ASSIGN_OR_RETURN(const std::vector<FlatPlan> flats,
                             SplitFlats(units, trainable, options));
    const PlannedFlats planned = PlannedFlatsOf(settings_, groups_.groups(),
                                                flats, stage, device.is_cpu());
    bytes.push_back(
        ModelStateBytes(planned, StatesOf(settings_, config_)).total());
  }
  TESSERA_ASSIGN_OR_RETURN(
      StageChoice choice,
      tessera::ChooseStage(bytes, settings_.shard_group_size, memory));
  model_.SetStage(choice.stage);
  auto_reason_ = std::move(choice.reason);
  if (settings_.shard_group_size < settings_.world_size) {
    absl::StrAppend(&auto_reason_, "; shard groups of ",
                    settings_.shard_group_size, " of ", settings_.world_size,
                    " ranks");
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
  if (limit == 0 || model_.stage() < 3 || flats.empty()) return;
  const int group_size = settings_.shard_group_size;
  const int reshard = config_.sharding().reshard_group_size();
  const bool on_cpu = flats[0].parameters[0].tensor.device().is_cpu();
  const PlannedFlats planned =
      PlannedFlatsOf(settings_, groups_.groups(), flats, /*stage=*/3, on_cpu);
  int64_t resharded_bytes = 0;
  for (const PlannedFlat& flat : planned.flats) {
    if (reshard > 0 && reshard < group_size && flat.sharded_parameters) {
      resharded_bytes += flat.whole_numel / reshard * flat.working_bytes;
    }
  }
  const int64_t most = MaxLiveWithin(planned, StatesOf(settings_, config_),
                                     resharded_bytes, limit);
  int64_t& max_live = settings_.schedule.max_live;
  if (most >= max_live) return;
  TESSERA_VLOG(engine, 1) << "sharding.memory_limit_bytes: at most " << most
                          << " elements are kept whole, instead of " << max_live
                          << " (stage3_max_live_parameters)";
  max_live = most;
}

}  // namespace tessera
