#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/config.pb.h"
#include "config/validate.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

// Returns the key that keeps a unit's step from being made before all gradients
// are there, and why; "" if there is none.
std::string WhatNeedsAllGradients(const proto::Config& config) {
  if (config.gradient_accumulation_steps() > 1) {
    return absl::StrCat("gradient_accumulation_steps is ",
                        config.gradient_accumulation_steps(),
                        ", and a step's gradient is there after the last one");
  }
  constexpr char kNorm[] =
      ", whose norm is that of all gradients: clip by gradient_clipping_value";
  if (config.gradient_clipping() > 0) {
    return absl::StrCat("gradient_clipping is ", config.gradient_clipping(),
                        kNorm);
  }
  for (const proto::ParamGroup& group : config.optimizer().param_groups()) {
    if (group.gradient_clipping() > 0) {
      return absl::StrCat("optimizer.param_groups has gradient_clipping ",
                          group.gradient_clipping(), kNorm);
    }
    if (group.adaptive_gradient_clipping() > 0) {
      return "optimizer.param_groups has adaptive_gradient_clipping, which "
             "ranks do together";
    }
  }
  if (config.adaptive_gradient_clipping() > 0) {
    return "adaptive_gradient_clipping is given, which ranks do together";
  }
  constexpr char kSkips[] =
      " is true, and a step is skipped by the gradients of all units";
  if (config.fp16().enabled()) return absl::StrCat("fp16.enabled", kSkips);
  if (config.bf16().enabled() && config.bf16().check_grad_overflow()) {
    return absl::StrCat("bf16.check_grad_overflow", kSkips,
                        ": set that to false");
  }
  if (config.sharding().report_grad_norm()) {
    return "sharding.report_grad_norm is true, whose norm is that of all "
           "gradients";
  }
  return "";
}

std::string WhatStepsOtherwise(const proto::Config& config) {
  if (!config.has_optimizer()) return "there is no optimizer";
  const std::string& type = config.optimizer().type();
  const std::optional<Algorithm> algorithm = FindAlgorithm(type);
  if (type == "Custom") {
    return "optimizer.type is Custom, a program's own, which Step calls";
  }
  if (algorithm.has_value()) {
    const AlgorithmRow& row = RowOf(*algorithm);
    if (row.directed != nullptr || row.rest != nullptr) {
      return absl::StrCat("optimizer.type is ", type,
                          ", which needs whole parameters and so all ranks: "
                          "use one that steps elements, as AdamW");
    }
  }
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const auto elsewhere = [](const std::string& device) {
    return !device.empty() && device != "none";
  };
  constexpr char kStream[] =
      ", which is updated in the background (sharding.offload.early_step does "
      "that within backward)";
  if (elsewhere(zero.offload_optimizer().device())) {
    return absl::StrCat("zero_optimization.offload_optimizer.device is ",
                        zero.offload_optimizer().device(), kStream);
  }
  if (elsewhere(zero.offload_param().device())) {
    return absl::StrCat("zero_optimization.offload_param.device is ",
                        zero.offload_param().device(), kStream);
  }
  for (const auto& [key, value] :
       {std::pair("shared_working_copy",
                  config.sharding().shared_working_copy()),
        std::pair("served_gathers", config.sharding().served_gathers())}) {
    if (value != "on") continue;
    return absl::StrCat("sharding.", key,
                        " is on, by which other ranks read what this one "
                        "steps: set that to auto or off");
  }
  return "";
}

}  // namespace

void ResolveStepInBackward(proto::Config* config, Faults* faults) {
  proto::Sharding& sharding = *config->mutable_sharding();
  if (!sharding.step_in_backward()) return;
  std::string why = WhatNeedsAllGradients(*config);
  if (why.empty()) why = WhatStepsOtherwise(*config);
  if (!why.empty()) {
    return faults->Add("sharding.step_in_backward",
                       "expected false, got true: ", why);
  }
  sharding.set_shared_working_copy("off");
  sharding.set_served_gathers("off");
}

}  // namespace tessera
