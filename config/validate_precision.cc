#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/validate.h"
#include "optim/algorithms/table.h"

namespace tessera {
namespace {

// Checks which modes go together. Autocast may be combined with bf16 but not
// with fp16: DeepSpeed's autocast has a loss scale of its own, beside that of
// fp16.
void CheckEnabled(const proto::Config& config, Faults* faults) {
  constexpr char kTwo[] = " is true too: enable one of the two";
  if (!config.fp16().enabled()) return;
  if (config.bf16().enabled()) {
    faults->Add("fp16.enabled", "bf16.enabled", kTwo);
  }
  if (config.torch_autocast().enabled()) {
    faults->Add("torch_autocast.enabled", "fp16.enabled", kTwo);
  }
}

// Checks these keys as DeepSpeed does, only for a dynamic scale: elsewhere they
// mean nothing, and files hold 0.
void CheckDynamicScale(const proto::Fp16& fp16, Faults* faults) {
  if (!fp16.enabled() || fp16.loss_scale() != 0) return;
  const auto check = [&](const char* path, int64_t value) {
    if (value >= 1) return;
    faults->Add(path, "expected at least 1 where fp16 is enabled and ",
                "loss_scale is 0, got ", value);
  };
  check("fp16.loss_scale_window", fp16.loss_scale_window());
  check("fp16.min_loss_scale", fp16.min_loss_scale());
}

// Returns more steps than any run that trains skips in a row: a dynamic scale
// comes down from its first value by one skipped step for each power of 2.
int64_t SkipsInARow(const proto::Fp16& fp16) {
  constexpr int64_t kEnough = 50;
  if (!fp16.enabled() || fp16.loss_scale() != 0) return kEnough;
  int64_t all = 0;
  if (__builtin_add_overflow(fp16.hysteresis(), fp16.initial_scale_power(),
                             &all)) {
    return fp16.hysteresis();
  }
  return std::max(kEnough, all);
}

const char* EnabledDtype(const proto::Config& config) {
  return config.bf16().enabled()   ? "bf16"
         : config.fp16().enabled() ? "fp16"
                                   : "fp32";
}

// Checks what DeepSpeed requires, too.
void CheckParamDtype(const proto::Config& config, Faults* faults) {
  if (!config.data_types().has_param_dtype()) return;
  const std::string& dtype = config.data_types().param_dtype();
  const char* const enabled = EnabledDtype(config);
  if (dtype != enabled) {
    faults->Add("data_types.param_dtype", "expected ", enabled,
                ", which bf16.enabled and fp16.enabled say, got '", dtype, "'");
  }
}

// Returns what prevents masters of 16 bits: steps by operators, by directions
// or of several points, and averages that are exchanged with masters; "" if
// nothing does.
std::string WhyMastersStayWide(const proto::Config& config) {
  if (!config.has_optimizer()) return "";
  const std::string& type = config.optimizer().type();
  const std::optional<Algorithm> algorithm = FindAlgorithm(type);
  if (!algorithm.has_value() || !TakesNarrowMasters(*algorithm)) {
    return absl::StrCat("of ", type);
  }
  if (config.optimizer().params().ema_decay() > 0) return "with ema_decay";
  if (config.precision().libtorch_exact()) return "with libtorch_exact";
  if (config.precision().libtorch_fused()) return "with libtorch_fused";
  return "";
}

constexpr char kMasterKey[] = "data_types.master_dtype";

// A master is the parameter and its remainder together, so a step needs both at
// hand.
void CheckRemainders(const proto::Config& config, Faults* faults) {
  if (!config.bf16().enabled()) {
    faults->Add(kMasterKey, "'fp32_remainder' needs bf16.enabled");
  }
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const auto check = [&](const char* key, const std::string& device) {
    if (device.empty() || device == "none") return;
    faults->Add(kMasterKey, absl::StrCat("zero_optimization.", key, ".device"),
                absl::StrCat(" is '", device,
                             "', but remainders and parameters stay in memory "
                             "together: expected none, or other masters than "
                             "'fp32_remainder'"));
  };
  check("offload_optimizer", zero.offload_optimizer().device());
  check("offload_param", zero.offload_param().device());
}

void CheckMasterDtype(const proto::Config& config, Faults* faults) {
  constexpr const char* kKey = kMasterKey;
  const std::string& dtype = config.data_types().master_dtype();
  if (!config.data_types().has_master_dtype() || dtype == "fp32") return;
  if (dtype == "fp32_remainder") return CheckRemainders(config, faults);
  if (dtype != EnabledDtype(config)) {
    return faults->Add(kKey, "'", dtype, "' needs ", dtype, ".enabled");
  }
  const std::string why = WhyMastersStayWide(config);
  if (why.empty()) return;
  faults->Add(kKey, "expected fp32 ", why, ", got '", dtype, "'");
}

// Returns why DeepSpeed's assertions of SECTION_master_weights_and_grads would
// fail when it makes its optimizer; "" if they hold. `states`: they have 16
// bits, too.
std::string WhyNarrowMastersFail(const proto::Config& config,
                                 const std::string& section, bool enabled,
                                 bool states) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const std::string& device = zero.offload_optimizer().device();
  const std::string& type = config.optimizer().type();
  const bool offloaded = device == "cpu" || device == "nvme";
  const bool adam = type == "Adam" || type == "AdamW";
  if (!enabled) return absl::StrCat("needs ", section, ".enabled");
  if (!zero.has_auto_stage() && zero.stage() == 0) {
    return "expected stages 1 to 3, as in DeepSpeed, got stage 0";
  }
  if (!config.has_optimizer() || (states && !offloaded)) return "";
  if (offloaded && adam) return "";
  return absl::StrCat(
      "expected Adam or AdamW with offload_optimizer, as in DeepSpeed",
      section == "bf16" && !states ? " unless bf16_optimizer_states is true"
                                   : "",
      ", got ", type, offloaded ? "" : " without it");
}

void ResolveNarrowMasters(const std::string& section, bool enabled, bool states,
                          proto::Config* config, Faults* faults) {
  const std::string key =
      absl::StrCat(section, ".", section, "_master_weights_and_grads");
  const std::string why =
      WhyNarrowMastersFail(*config, section, enabled, states);
  if (!why.empty()) return faults->Add(key, why);
  proto::DataTypes& types = *config->mutable_data_types();
  if (!types.has_grad_accum_dtype()) types.set_grad_accum_dtype(section);
  const std::string wide = WhyMastersStayWide(*config);
  if (!types.has_master_dtype()) {
    types.set_master_dtype(wide.empty() ? section : "fp32");
  }
  const bool narrow = types.master_dtype() == section;
  faults->Note(
      key, "gradients are kept in ", types.grad_accum_dtype(),
      states ? ", states in bf16" : "", ", masters in ", types.master_dtype(),
      narrow || wide.empty() ? "" : ", as they are ", wide,
      narrow ? ", rounded stochastically: no update is too small" : "");
}

// Resolves bf16_master_weights_and_grads, bf16_optimizer_states, and the same
// keys of fp16.
void ResolveNarrowStates(proto::Config* config, Faults* faults) {
  const proto::Bf16& bf16 = config->bf16();
  const bool states = bf16.bf16_optimizer_states();
  const proto::OptimizerParams& params = config->optimizer().params();
  constexpr char kStates[] = "bf16.bf16_optimizer_states";
  if (states && !bf16.bf16_master_weights_and_grads()) {
    faults->Add(kStates,
                "needs bf16_master_weights_and_grads, as in DeepSpeed");
  } else if (states && params.has_state_dtype() &&
             params.state_dtype() != "bf16") {
    faults->Add(kStates, "true, and optimizer.params.state_dtype of ",
                config->optimizer().type(), " is ", params.state_dtype());
  }
  if (bf16.bf16_master_weights_and_grads()) {
    ResolveNarrowMasters("bf16", bf16.enabled(), states, config, faults);
  }
  if (config->fp16().fp16_master_weights_and_grads()) {
    ResolveNarrowMasters("fp16", config->fp16().enabled(), /*states=*/false,
                         config, faults);
  }
}

// `names` holds pairs of what may be written and what is meant.
void Rename(
    std::initializer_list<std::pair<absl::string_view, absl::string_view>>
        names,
    std::string* dtype) {
  for (const auto& [written, meant] : names) {
    if (*dtype == written) {
      *dtype = std::string(meant);
      return;
    }
  }
}

void NameShortDtype(std::string* dtype) {
  Rename({{"bfloat16", "bf16"},
          {"torch.bfloat16", "bf16"},
          {"float16", "fp16"},
          {"torch.float16", "fp16"},
          {"half", "fp16"},
          {"float32", "fp32"},
          {"torch.float32", "fp32"},
          {"float", "fp32"}},
         dtype);
}

}  // namespace

void NameDtypes(proto::Config* config) {
  if (config->has_data_types()) {
    proto::DataTypes& types = *config->mutable_data_types();
    if (types.has_grad_accum_dtype()) {
      NameShortDtype(types.mutable_grad_accum_dtype());
    }
    if (types.has_master_dtype()) NameShortDtype(types.mutable_master_dtype());
    if (types.has_param_dtype()) NameShortDtype(types.mutable_param_dtype());
    if (types.has_buffer_dtype()) NameShortDtype(types.mutable_buffer_dtype());
  }
  if (config->torch_autocast().has_dtype()) {
    Rename({{"bf16", "bfloat16"},
            {"torch.bfloat16", "bfloat16"},
            {"fp16", "float16"},
            {"half", "float16"},
            {"torch.float16", "float16"}},
           config->mutable_torch_autocast()->mutable_dtype());
  }
}

void ResolvePrecision(proto::Config* config, Faults* faults) {
  FillDefaults(config->mutable_bf16());
  FillDefaults(config->mutable_fp16());
  FillDefaults(config->mutable_torch_autocast());
  CheckEnabled(*config, faults);
  CheckDynamicScale(config->fp16(), faults);
  if (config->torch_autocast().enabled() &&
      config->torch_autocast().dtype() == "float16") {
    faults->Note("torch_autocast.dtype",
                 "float16: the loss is not scaled here, so small gradients "
                 "become 0: use bfloat16, or scale the loss");
  }
  CheckParamDtype(*config, faults);
  ResolveNarrowStates(config, faults);
  CheckMasterDtype(*config, faults);
  proto::Precision& precision = *config->mutable_precision();
  FillDefaults(&precision);
  if (!precision.has_max_skipped_in_a_row()) {
    precision.set_max_skipped_in_a_row(SkipsInARow(config->fp16()));
  }
  faults->CheckNoneEmpty("precision.fp32_classes", precision.fp32_classes());
  if (config->fp16().auto_cast() && !precision.cast_inputs()) {
    faults->Add("precision.cast_inputs",
                "false contradicts fp16.auto_cast, which is true");
  }
}

}  // namespace tessera
