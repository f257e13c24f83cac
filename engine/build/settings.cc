#include "engine/build/settings.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "config/config.h"
#include "config/config.pb.h"
#include "config/options/option_values.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/coefficients.h"
#include "sharding/recompute/matmul_operators.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// Units below this are reduced together: then a collective's own cost, some
// microseconds, no longer counts beside what it carries.
constexpr int64_t kSmallBucketNumel = 1 << 18;

at::ScalarType DtypeOf(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  return lower == "fp16" || lower == "float16" ? at::kHalf
         : lower == "fp32"                     ? at::kFloat
                                               : at::kBFloat16;
}

template <typename Strings>
std::vector<std::string> List(const Strings& strings) {
  return {strings.begin(), strings.end()};
}

// Leaves by path, besides those by class.
ModulePredicate LeafPredicate(const proto::LeafModule& leaf,
                              ModulePredicate users) {
  return [names = List(leaf.names()), suffixes = List(leaf.name_suffixes()),
          users = std::move(users)](const torch::nn::Module& module,
                                    absl::string_view path) {
    if (users != nullptr && users(module, path)) return true;
    return std::find(names.begin(), names.end(), path) != names.end() ||
           std::any_of(suffixes.begin(), suffixes.end(),
                       [&](const std::string& suffix) {
                         return absl::EndsWith(path, suffix);
                       });
  };
}

// Returns the algorithm of all parameters except Muon's matrices.
Algorithm AlgorithmOf(const proto::Optimizer& optimizer) {
  const Algorithm algorithm =
      FindAlgorithm(optimizer.type()).value_or(Algorithm::kAdam);
  const AlgorithmRow& row = RowOf(algorithm);
  if (row.rest != nullptr) return row.rest->algorithm;
  if (algorithm != Algorithm::kAdam && algorithm != Algorithm::kAdamW) {
    return algorithm;
  }
  return optimizer.params().adam_w_mode() ? Algorithm::kAdamW
                                          : Algorithm::kAdam;
}

OptimizerOptions OptimizerOf(const proto::Optimizer& optimizer) {
  const proto::OptimizerParams& params = optimizer.params();
  OptimizerOptions o;
  o.algorithm = AlgorithmOf(optimizer);
  ReadOptions(params, /*defaults=*/true, &o);
  o.states = params.state_dtype() == "bf16"   ? StateType::kBFloat16
             : params.state_dtype() == "8bit" ? StateType::kBlock8
                                              : StateType::kFloat32;
  if (optimizer.type() == "Muon") o.lr = params.adam_lr();
  return o;
}

// Returns the options of the matrices that Muon steps.
OptimizerOptions MuonOf(const proto::OptimizerParams& params,
                        OptimizerOptions o) {
  o.algorithm = Algorithm::kMuon;
  ReadOptions(params, /*defaults=*/true, &o);
  o.lr = params.muon_lr();
  o.ns_steps = params.ns_steps();
  o.ns_gram = params.ns_method() == "gram";
  o.match_rms_adamw = params.adjust_lr_fn() == "match_rms_adamw";
  return o;
}

void SetCustom(const CustomOptimizer& custom, OptimizerOptions* o) {
  if (custom.reads_rate_alone) o->algorithm = Algorithm::kCustomOfRate;
  o->custom = std::make_shared<const CustomOptimizer>(custom);
  o->custom_states = static_cast<int>(custom.states.size());
}

LossScalerOptions LossScalerOf(const proto::Fp16& fp16) {
  LossScalerOptions options;
  options.static_scale = fp16.loss_scale();
  options.initial_scale_power = fp16.initial_scale_power();
  options.window = fp16.loss_scale_window();
  options.hysteresis = fp16.hysteresis();
  options.consecutive_hysteresis = fp16.consecutive_hysteresis();
  options.min_scale = static_cast<double>(fp16.min_loss_scale());
  return options;
}

PartitionOptions PartitionOf(const proto::Config& config,
                             const EngineOptions& options) {
  const proto::Sharding& sharding = config.sharding();
  const proto::LeafModule& leaf = config.zero_optimization().leaf_module();
  PartitionOptions partition;
  partition.max_unit_numel = sharding.max_unit_numel();
  partition.unit_classes = List(sharding.unit_classes());
  partition.is_unit = options.is_unit;
  partition.leaf_classes = List(leaf.classes());
  partition.is_leaf = LeafPredicate(leaf, options.is_leaf);
  partition.ignored = List(sharding.ignored_parameters());
  partition.keep_norms_fp32 = config.precision().fp32_norms();
  partition.fp32_classes = List(config.precision().fp32_classes());
  return partition;
}

Tier TierOf(const std::string& device) {
  if (device == "nvme") return Tier::kDisk;
  return device == "cpu" ? Tier::kHost : Tier::kMemory;
}

// Without a folder.
SwapOptions SwapOf(const proto::Config& config) {
  SwapOptions swap;
  swap.block_bytes = config.aio().block_size();
  swap.queue_depth = static_cast<int>(config.aio().queue_depth());
  swap.threads = static_cast<int>(config.aio().intra_op_parallelism());
  swap.single_submit = config.aio().single_submit();
  swap.overlap_events = config.aio().overlap_events();
  swap.checksums = config.sharding().offload().checksums();
  return swap;
}

void SetRecompute(const proto::ActivationCheckpointing& config,
                  const EngineOptions& options, const SwapOptions& swap,
                  Settings* settings) {
  settings->recomputed.units = List(config.units());
  settings->recomputed.is_recomputed = options.is_recomputed;
  settings->recomputed.every = config.every();
  RecomputeOptions& recompute = settings->recompute;
  if (config.policy() == "selective") recompute.keeps = IsMatmulOrAttention;
  recompute.budget_bytes = config.budget_bytes();
  if (config.check() == "always") recompute.checks = ReplayChecks::kAlways;
  if (config.check() == "never") recompute.checks = ReplayChecks::kNever;
  recompute.recomputes = config.policy() != "keep";
  settings->activations.tier = TierOf(config.offload());
  settings->activations.least_bytes = config.offload_min_bytes();
  settings->activations.swap = swap;
  settings->activations.swap.folder = config.nvme_path();
}

ScheduleOptions ScheduleOf(const proto::Config& config) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  ScheduleOptions schedule;
  schedule.prefetch = zero.stage3_prefetch_bucket_size();
  schedule.max_live = zero.stage3_max_live_parameters();
  schedule.max_reuse_distance = zero.stage3_max_reuse_distance();
  schedule.reshard_after_forward = config.sharding().has_reshard_group_size() ||
                                   config.sharding().reshard_after_forward();
  return schedule;
}

OffloadOptions OffloadOf(const proto::Config& config) {
  const proto::OffloadOptimizer& optimizer =
      config.zero_optimization().offload_optimizer();
  const proto::OffloadTuning& tuning = config.sharding().offload();
  OffloadOptions offload;
  const proto::OffloadParam& parameters =
      config.zero_optimization().offload_param();
  if (config.has_optimizer()) offload.states = TierOf(optimizer.device());
  offload.parameters = TierOf(parameters.device());
  offload.updates = config.has_optimizer();
  offload.ratio = optimizer.ratio();
  offload.max_in_memory = parameters.max_in_cpu();
  offload.swap = SwapOf(config);
  offload.swap.folder = offload.states == Tier::kDisk ? optimizer.nvme_path()
                                                      : parameters.nvme_path();
  // One is read, one computed, one written.
  constexpr int64_t kSlicesOfBuffer = 3;
  offload.stream.buffers = static_cast<int>(
      kSlicesOfBuffer * std::max<int64_t>(optimizer.buffer_count(), 1));
  offload.stream.slice_numel = tuning.slice_numel();
  offload.step_cores = optimizer.cpuadam_cores_perc();
  offload.min_state_bytes = tuning.min_state_bytes();
  // Where micro-batches are added up as they are reduced, a gradient is there
  // when the last one has ended.
  offload.early_step =
      tuning.early_step() && (config.gradient_accumulation_steps() == 1 ||
                              config.sharding().accumulation() == "local");
  offload.early_bytes = tuning.early_bytes();
  offload.gradients = offload.states == Tier::kDisk && tuning.gradients();
  return offload;
}

GradientOptions GradientsOf(const proto::Config& config, int world_size) {
  const int sequence_ranks = SequenceRanksOf(config);
  GradientOptions gradients;
  gradients.bucket_numel = std::min<int64_t>(
      config.zero_optimization().reduce_bucket_size(), kSmallBucketNumel);
  gradients.mean = config.gradient_allreduce_op() == "mean";
  gradients.ranks_of_sample = sequence_ranks;
  gradients.predivide = config.prescale_gradients()
                            ? world_size / sequence_ranks
                            : config.gradient_predivide_factor();
  gradients.accumulation = config.gradient_accumulation_steps();
  gradients.uses_up = config.sharding().step_in_backward();
  gradients.half = config.torch_autocast().enabled() &&
                   DtypeOf(config.torch_autocast().dtype()) == at::kHalf;
  return gradients;
}

// A step's gradient has one micro-batch, which is this rank's, and what steps
// it takes 16 bits without a copy.
bool KeepsNarrowGradients(const proto::Config& config, const Settings& settings,
                          int world_size) {
  const auto takes = [](const std::optional<OptimizerOptions>& o) {
    return !o.has_value() ||
           (!o->libtorch_exact && !o->libtorch_fused && o->custom == nullptr &&
            !IsDirection(FormulaOf(*o)));
  };
  const auto& groups = config.optimizer().param_groups();
  const auto clips = [](const proto::ParamGroup& group) {
    return group.has_gradient_clipping() ||
           group.has_adaptive_gradient_clipping();
  };
  return world_size == 1 && settings.gradients.accumulation == 1 &&
         settings.gradients.predivide == 1 && settings.step.max_value == 0 &&
         config.adaptive_gradient_clipping() == 0 &&
         std::none_of(groups.begin(), groups.end(), clips) &&
         takes(settings.optimizer) && takes(settings.muon);
}

}  // namespace

Settings SettingsOf(const proto::Config& config, const EngineOptions& options,
                    int world_size) {
  Settings s;
  s.partition = PartitionOf(config, options);
  s.schedule = ScheduleOf(config);
  SetRecompute(config.activation_checkpointing(), options, SwapOf(config), &s);
  s.gradients = GradientsOf(config, world_size);
  s.offload = OffloadOf(config);
  const proto::ZeroOptimization& zero = config.zero_optimization();
  s.flats.persistence_threshold = zero.stage3_param_persistence_threshold();
  s.flats.model_persistence_threshold =
      zero.stage3_model_persistence_threshold();
  s.step.max_norm = config.gradient_clipping();
  s.step.norm_type = config.gradient_clipping_norm();
  s.step.max_value = config.gradient_clipping_value();
  s.step.adaptive_eps = config.adaptive_gradient_clipping_eps();
  s.step.report_norm = config.sharding().report_grad_norm();
  s.step.skip_on_overflow =
      config.fp16().enabled() ||
      (config.bf16().enabled() && config.bf16().check_grad_overflow());
  s.step.name_overflows =
      (config.fp16().enabled() && config.fp16().name_overflows()) ||
      (config.bf16().enabled() && config.bf16().name_overflows());
  if (config.has_optimizer()) {
    s.optimizer = OptimizerOf(config.optimizer());
    s.optimizer->libtorch_exact = config.precision().libtorch_exact();
    s.optimizer->libtorch_fused = config.precision().libtorch_fused();
    if (options.optimizer.has_value()) {
      SetCustom(*options.optimizer, &*s.optimizer);
    }
    if (config.optimizer().type() == "Muon") {
      s.muon = MuonOf(config.optimizer().params(), *s.optimizer);
    }
    s.offload.optimizer_states =
        StateCountOf(*s.optimizer) + (s.optimizer->ema_decay > 0 ? 1 : 0);
  }
  if (config.fp16().enabled()) s.loss_scaler = LossScalerOf(config.fp16());
  if (config.fp16().enabled()) s.param_dtype = at::kHalf;
  if (config.bf16().enabled()) s.param_dtype = at::kBFloat16;
  const std::string& masters = config.data_types().master_dtype();
  s.narrow_masters = masters == "bf16" || masters == "fp16";
  s.remainder_masters = masters == "fp32_remainder";
  if (config.data_types().has_buffer_dtype()) {
    s.buffer_dtype = DtypeOf(config.data_types().buffer_dtype());
  }
  if (config.has_communication_data_type()) {
    s.reduce_dtype = DtypeOf(config.communication_data_type());
  }
  if (config.data_types().has_grad_accum_dtype()) {
    s.gradient_dtype = DtypeOf(config.data_types().grad_accum_dtype());
  }
  if (config.torch_autocast().enabled()) {
    s.autocast_dtype = DtypeOf(config.torch_autocast().dtype());
  }
  s.cast_inputs = s.param_dtype.has_value() && config.precision().cast_inputs();
  s.check_writes = config.sharding().check_writes();
  s.shard_alone = config.sharding().shard_alone();
  if (config.sharding().deterministic() != "off") {
    s.determinism = config.sharding().deterministic() == "on"
                        ? Determinism::kErrors
                        : Determinism::kWarns;
  }
  if (config.sharding().buffer_sync() != "local") {
    s.buffer_sync = config.sharding().buffer_sync() == "mean"
                        ? BufferSync::Values::kMean
                        : BufferSync::Values::kRank0;
  }
  s.narrow_gradients = KeepsNarrowGradients(config, s, world_size);
  s.world_size = world_size;
  s.shard_group_size = config.sharding().shard_group_size();
  if (s.shard_group_size == 0) s.shard_group_size = world_size;
  return s;
}

std::optional<SwapOptions> DiskOf(const proto::Config& config) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const bool sharded = !zero.has_stage() || zero.stage() == 3;
  SwapOptions swap = SwapOf(config);
  const auto takes = [&](const std::string& device, const std::string& folder) {
    if (device != "nvme" && device != "auto") return false;
    swap.folder = folder;
    return !folder.empty();
  };
  const proto::ActivationCheckpointing& activations =
      config.activation_checkpointing();
  const bool any = (sharded && (takes(zero.offload_optimizer().device(),
                                      zero.offload_optimizer().nvme_path()) ||
                                takes(zero.offload_param().device(),
                                      zero.offload_param().nvme_path()))) ||
                   takes(activations.offload(), activations.nvme_path());
  return any ? std::optional(swap) : std::nullopt;
}

void SetOverlap(const proto::ZeroOptimization& zero, int stage,
                Settings* settings) {
  const bool wanted =
      zero.has_overlap_comm() ? zero.overlap_comm() : stage == 3;
  settings->schedule.overlap = wanted;
  settings->gradients.overlap = wanted || stage == 0;
}

at::ScalarType WorkingDtype(const Settings& settings,
                            const NamedParameter& parameter) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  const bool kept =
      !settings.param_dtype.has_value() || !c10::isFloatingType(own);
  if (kept) return own;
  return parameter.keep_fp32 ? at::kFloat : *settings.param_dtype;
}

FlatParameterOptions FlatParameterOptionsOf(const Settings& settings,
                                            const FlatPlan& flat, int stage) {
  FlatParameterOptions options;
  options.stage = Stage::Of(stage);
  if (flat.persistent) options.stage.sharded_parameters = false;
  if (flat.working_dtype != flat.dtype) options.dtype = flat.working_dtype;
  if (c10::isFloatingType(flat.working_dtype) &&
      flat.working_dtype != at::kDouble) {
    options.reduce_dtype = settings.reduce_dtype;
    options.gradient_dtype = settings.gradient_dtype;
    options.narrow_gradients = settings.narrow_gradients;
  }
  options.narrow_masters = settings.narrow_masters;
  options.remainder_masters = settings.remainder_masters;
  options.trainable = flat.trainable;
  options.overlap = settings.schedule.overlap;
  options.cast_inputs = settings.cast_inputs;
  options.check_writes = settings.check_writes;
  options.shard_alone = settings.shard_alone;
  return options;
}

}  // namespace tessera
