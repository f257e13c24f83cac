#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

// Autocast may go with bf16, not with fp16: DeepSpeed's has a loss scale of its
// own, beside that of fp16.
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

// Like DeepSpeed, only where the scale is found while training: elsewhere they
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

// DeepSpeed asks for the same.
void CheckParamDtype(const proto::Config& config, Faults* faults) {
  if (!config.data_types().has_param_dtype()) return;
  const std::string& dtype = config.data_types().param_dtype();
  const char* enabled = config.bf16().enabled()   ? "bf16"
                        : config.fp16().enabled() ? "fp16"
                                                  : "fp32";
  if (dtype != enabled) {
    faults->Add("data_types.param_dtype", "expected ", enabled,
                ", which bf16.enabled and fp16.enabled say, got '", dtype, "'");
  }
}

// `names`: {what may be written, what is meant}.
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
  proto::Precision& precision = *config->mutable_precision();
  FillDefaults(&precision);
  faults->CheckNoneEmpty("precision.fp32_classes", precision.fp32_classes());
  if (config->fp16().auto_cast() && !precision.cast_inputs()) {
    faults->Add("precision.cast_inputs",
                "false contradicts fp16.auto_cast, which is true");
  }
}

}  // namespace tessera
