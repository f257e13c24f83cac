#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/validate.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

// Replaces a deprecated key by the one that says the same now.
void ResolveDeprecated(proto::ZeroOptimization* zero, Faults* faults) {
  const auto both = [&](const char* key, const char* other) {
    faults->Add(key, "says the same as ", other, ": write that alone");
  };
  if (zero->has_cpu_offload() && zero->has_offload_optimizer()) {
    both("zero_optimization.cpu_offload", "offload_optimizer");
  } else if (zero->cpu_offload()) {
    zero->mutable_offload_optimizer()->set_device("cpu");
  }
  if (zero->has_cpu_offload_param() && zero->has_offload_param()) {
    both("zero_optimization.cpu_offload_param", "offload_param");
  } else if (zero->cpu_offload_param()) {
    zero->mutable_offload_param()->set_device("cpu");
  }
  if (zero->has_stage3_gather_fp16_weights_on_model_save()) {
    if (zero->has_gather_16bit_weights_on_model_save()) {
      both("zero_optimization.stage3_gather_fp16_weights_on_model_save",
           "stage3_gather_16bit_weights_on_model_save");
    }
    zero->set_gather_16bit_weights_on_model_save(
        zero->stage3_gather_fp16_weights_on_model_save());
  }
  zero->clear_cpu_offload();
  zero->clear_cpu_offload_param();
  zero->clear_stage3_gather_fp16_weights_on_model_save();
}

void ResolveOffload(proto::ZeroOptimization* zero, Faults* faults) {
  const bool below_3 = zero->has_stage() && zero->stage() < 3;
  const auto check_path = [&](const char* path, const auto& offload) {
    if (offload.device() == "nvme" && offload.nvme_path().empty()) {
      faults->Add(path, "missing: device nvme needs a folder");
    }
  };
  if (zero->has_offload_optimizer()) {
    proto::OffloadOptimizer& offload = *zero->mutable_offload_optimizer();
    FillDefaults(&offload);
    if (below_3 && offload.device() == "nvme") {
      faults->Note("zero_optimization.offload_optimizer.device",
                   "nvme counts as cpu at stage ", zero->stage(),
                   ", as in DeepSpeed: it needs stage 3");
    } else {
      check_path("zero_optimization.offload_optimizer.nvme_path", offload);
    }
    if (below_3 && offload.ratio() < 1) {
      faults->Add("zero_optimization.offload_optimizer.ratio",
                  "expected 1 at stage ", zero->stage(), ", got ",
                  offload.ratio(), ": less needs stage 3");
    }
  }
  if (zero->has_offload_param()) {
    proto::OffloadParam& offload = *zero->mutable_offload_param();
    FillDefaults(&offload);
    if (below_3 && offload.device() != "none") {
      faults->Note("zero_optimization.offload_param.device",
                   "has no effect at stage ", zero->stage(),
                   ": parameters are offloaded at stage 3 only");
    } else {
      check_path("zero_optimization.offload_param.nvme_path", offload);
    }
  }
}

void ResolveZero(int world_size, proto::ZeroOptimization* zero,
                 Faults* faults) {
  FillDefaults(zero);
  if (zero->stage() < 0 || zero->stage() > 3) {
    faults->Add("zero_optimization.stage", "expected 0, 1, 2 or 3, got ",
                zero->stage());
  }
  if (!zero->has_overlap_comm() && zero->has_stage()) {
    zero->set_overlap_comm(zero->stage() == 3);
  }
  ResolveOffload(zero, faults);
  if (zero->has_zenflow()) FillDefaults(zero->mutable_zenflow());
  const int64_t hpz = zero->zero_hpz_partition_size();
  if (hpz > 0 && world_size % hpz != 0) {
    faults->Add("zero_optimization.zero_hpz_partition_size",
                "expected a divisor of the world size ", world_size, ", got ",
                hpz);
  }
  const proto::LeafModule& leaf = zero->leaf_module();
  faults->CheckNoneEmpty("zero_optimization.leaf_module.classes",
                         leaf.classes());
  faults->CheckNoneEmpty("zero_optimization.leaf_module.names", leaf.names());
  faults->CheckNoneEmpty("zero_optimization.leaf_module.name_suffixes",
                         leaf.name_suffixes());
}

bool HasSecondShards(const proto::ZeroOptimization& zero) {
  return zero.zero_hpz_partition_size() > 1;
}

// Makes hpZ the value of reshard_after_forward. REQUIRES: `sharding` has no
// defaults yet, so what is set was given.
void ResolveSecondShards(int world_size, const proto::ZeroOptimization& zero,
                         proto::Sharding* sharding, Faults* faults) {
  const int64_t ranks = zero.zero_hpz_partition_size();
  if (!HasSecondShards(zero) || world_size % ranks != 0) return;
  std::string other;
  if (sharding->has_reshard_group_size()) {
    if (sharding->reshard_group_size() == ranks) return;
    other = std::to_string(sharding->reshard_group_size());
  } else if (sharding->has_reshard_after_forward()) {
    other = sharding->reshard_after_forward() ? "true" : "false";
  } else {
    sharding->set_reshard_group_size(static_cast<int32_t>(ranks));
    return;
  }
  faults->Add("zero_optimization.zero_hpz_partition_size",
              "says what becomes of parameters after their forward, got ",
              ranks, ", and so does sharding.reshard_after_forward, which is ",
              other, ": write one of them");
}

void CheckGroups(int world_size, const proto::ZeroOptimization& zero,
                 const proto::Sharding& sharding, Faults* faults) {
  const int32_t shards = sharding.shard_group_size();
  if (shards > 0 && world_size % shards != 0) {
    faults->Add("sharding.shard_group_size",
                "expected the ranks of a group, a divisor of the world size ",
                world_size, ", or 0 for all, got ", shards);
  } else if (shards > 0 && shards < world_size && zero.has_stage() &&
             zero.stage() == 0) {
    faults->Note("sharding.shard_group_size",
                 "has no effect at stage 0, where nothing is sharded");
  }
  if (!sharding.has_reshard_group_size()) return;
  const char* const key = HasSecondShards(zero)
                              ? "zero_optimization.zero_hpz_partition_size"
                              : "sharding.reshard_group_size";
  const int32_t group = sharding.reshard_group_size();
  if (group < 2 || world_size % group != 0) {
    faults->Add(key,
                "expected the ranks of a group, at least 2 and a divisor of "
                "the world size ",
                world_size, ", got ", group);
  } else if (shards > 0 && shards % group != 0) {
    faults->Add(key, "expected a divisor of sharding.shard_group_size ", shards,
                ", got ", group);
  }
  if (sharding.served_gathers() == "on") {
    faults->Add("sharding.served_gathers", "expected auto or off, since ",
                HasSecondShards(zero)
                    ? "zero_optimization.zero_hpz_partition_size"
                    : "sharding.reshard_after_forward",
                " is a number, got 'on'");
  }
}

constexpr int64_t kBlock =
    4096;  // bytes of a disk's block; elements of a slice

bool StatesMayBeOnDisk(const proto::ZeroOptimization& zero) {
  const auto may_be = [](const std::string& device) {
    return device == "nvme" || device == "auto";
  };
  return (!zero.has_stage() || zero.stage() == 3) &&
         (may_be(zero.offload_optimizer().device()) ||
          may_be(zero.offload_param().device()));
}

// DeepSpeed refuses GPUDirect Storage without CUDA.
void ResolveAio(const proto::ZeroOptimization& zero, proto::Config* config,
                Faults* faults) {
  const bool on_disk = StatesMayBeOnDisk(zero) ||
                       config->activation_checkpointing().offload() == "nvme";
  if (config->has_aio() && !on_disk) {
    faults->Note("aio", "has no effect: nothing is offloaded to nvme");
  }
  if (!config->has_aio() && !on_disk) return;
  proto::Aio& aio = *config->mutable_aio();
  FillDefaults(&aio);
  if (aio.block_size() % kBlock != 0) {
    faults->Add("aio.block_size", "expected a multiple of ", kBlock, ", got ",
                aio.block_size());
  }
  if (!aio.use_gds()) return;
  faults->Add("aio.use_gds",
              "expected false, got true: there is no GPUDirect Storage in this "
              "version");
}

void ResolveActivations(proto::ActivationCheckpointing* activations,
                        Faults* faults) {
  if (activations->cpu_checkpointing()) {
    if (activations->has_offload() && activations->offload() != "cpu") {
      faults->Add("activation_checkpointing.cpu_checkpointing",
                  "expected false with offload \"", activations->offload(),
                  "\", got true");
    }
    activations->set_offload("cpu");
  }
  activations->clear_cpu_checkpointing();
  if (activations->policy() == "auto" && activations->units().empty()) {
    activations->add_units("auto");
  }
  FillDefaults(activations);
  if (activations->offload() == "nvme" && activations->nvme_path().empty()) {
    faults->Add("activation_checkpointing.nvme_path",
                "expected a folder, for offload \"nvme\"");
  }
  if (activations->policy() == "keep" && activations->offload() == "none") {
    faults->Add("activation_checkpointing.policy",
                "\"keep\" is for offload \"cpu\" or \"nvme\", and that is "
                "\"none\": leave activation_checkpointing out");
  }
  faults->CheckNoneEmpty("activation_checkpointing.units",
                         activations->units());
}

// Checks that slices begin at blocks of a disk: 64 elements of 8 bits are 68
// bytes.
void ResolveOffloadTuning(proto::Config* config, Faults* faults) {
  proto::OffloadTuning& tuning = *config->mutable_sharding()->mutable_offload();
  FillDefaults(&tuning);
  const bool codes = config->optimizer().params().state_dtype() == "8bit" &&
                     StatesMayBeOnDisk(config->zero_optimization());
  const int64_t multiple = codes ? 16 * kBlock : kBlock;
  if (tuning.slice_numel() % multiple == 0) return;
  faults->Add("sharding.offload.slice_numel", "expected a multiple of ",
              multiple, codes ? " with state_dtype 8bit on nvme" : "", ", got ",
              tuning.slice_numel());
}

using Obstacles = std::vector<std::string>;

// Adds the keys that keep a unit's step from being known before all gradients
// are there, and why.
void AddWhatNeedsAllGradients(const proto::Config& config,
                              Obstacles* obstacles) {
  const auto add = [&](bool is_so, const auto&... words) {
    if (is_so) obstacles->push_back(absl::StrCat(words...));
  };
  const int64_t steps = config.gradient_accumulation_steps();
  add(steps > 1, "gradient_accumulation_steps is ", steps,
      ", and a step's gradient is there after the last one");
  add(config.gradient_clipping() > 0, "gradient_clipping is ",
      config.gradient_clipping(),
      ", whose norm is that of all gradients: set it to 0 (its default is 1); "
      "gradient_clipping_value may be given");
  constexpr char kTogether[] = ", which ranks do together: set that to 0";
  add(config.adaptive_gradient_clipping() > 0, "adaptive_gradient_clipping is ",
      config.adaptive_gradient_clipping(), kTogether);
  for (const proto::ParamGroup& group : config.optimizer().param_groups()) {
    add(group.gradient_clipping() > 0,
        "optimizer.param_groups has gradient_clipping ",
        group.gradient_clipping(), ", a norm of all of its gradients");
    add(group.adaptive_gradient_clipping() > 0,
        "optimizer.param_groups has adaptive_gradient_clipping ",
        group.adaptive_gradient_clipping(), kTogether);
  }
  constexpr char kSkips[] =
      " is true, and a step is skipped by the gradients of all units";
  add(config.fp16().enabled(), "fp16.enabled", kSkips);
  add(config.bf16().enabled() && config.bf16().check_grad_overflow(),
      "bf16.check_grad_overflow", kSkips, ": set that to false");
  add(config.sharding().report_grad_norm(),
      "sharding.report_grad_norm is true, whose norm is that of all gradients");
  add(config.histograms().every_steps() > 0 && config.histograms().gradients(),
      "histograms.gradients is true, and no gradients are left for it: set "
      "that "
      "to false");
}

void AddWhatStepsOtherwise(const proto::Config& config, Obstacles* obstacles) {
  const auto add = [&](bool is_so, const auto&... words) {
    if (is_so) obstacles->push_back(absl::StrCat(words...));
  };
  const std::string& type = config.optimizer().type();
  const std::optional<Algorithm> algorithm = FindAlgorithm(type);
  add(!config.has_optimizer(), "there is no optimizer");
  add(type == "Custom",
      "optimizer.type is Custom, a program's own, which Step calls");
  add(algorithm.has_value() && (RowOf(*algorithm).directed != nullptr ||
                                RowOf(*algorithm).rest != nullptr),
      "optimizer.type is ", type,
      ", which needs whole parameters and so all ranks: use one that steps "
      "elements, as AdamW");
  const proto::ZeroOptimization& zero = config.zero_optimization();
  for (const auto& [key, device] :
       {std::pair("offload_optimizer", zero.offload_optimizer().device()),
        std::pair("offload_param", zero.offload_param().device())}) {
    add(!device.empty() && device != "none", "zero_optimization.", key,
        ".device is ", device,
        ", which is updated in the background (sharding.offload.early_step "
        "does that within backward)");
  }
  const proto::Sharding& sharding = config.sharding();
  for (const auto& [key, value] :
       {std::pair("shared_working_copy", sharding.shared_working_copy()),
        std::pair("served_gathers", sharding.served_gathers())}) {
    add(value == "on", "sharding.", key,
        " is on, by which other ranks read what this one steps: set that to "
        "auto or off");
  }
}

}  // namespace

void ResolveSharding(int world_size, proto::Config* config, Faults* faults) {
  ResolveDeprecated(config->mutable_zero_optimization(), faults);
  ResolveZero(world_size, config->mutable_zero_optimization(), faults);
  ResolveAio(config->zero_optimization(), config, faults);
  proto::Sharding& sharding = *config->mutable_sharding();
  const proto::ZeroOptimization& zero = config->zero_optimization();
  ResolveSecondShards(world_size, zero, &sharding, faults);
  FillDefaults(&sharding);
  ResolveOffloadTuning(config, faults);
  faults->CheckNoneEmpty("sharding.unit_classes", sharding.unit_classes());
  faults->CheckNoneEmpty("sharding.ignored_parameters",
                         sharding.ignored_parameters());
  CheckGroups(world_size, zero, sharding, faults);
  ResolveActivations(config->mutable_activation_checkpointing(), faults);
}

void ResolveStepInBackward(proto::Config* config, Faults* faults) {
  proto::Sharding& sharding = *config->mutable_sharding();
  if (!sharding.step_in_backward()) return;
  Obstacles obstacles;
  AddWhatNeedsAllGradients(*config, &obstacles);
  AddWhatStepsOtherwise(*config, &obstacles);
  for (const std::string& why : obstacles) {
    faults->Add("sharding.step_in_backward", "expected false, got true: ", why);
  }
  if (!obstacles.empty()) return;
  sharding.set_shared_working_copy("off");
  sharding.set_served_gathers("off");
}

}  // namespace tessera
