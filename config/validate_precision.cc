#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

// One of the three ways of computing in 16 bits.
void CheckOneIsEnabled(const proto::Config& config, Faults* faults) {
  constexpr char kTwo[] = " is true too: enable one of the two";
  const bool bf16 = config.bf16().enabled();
  const bool fp16 = config.fp16().enabled();
  if (bf16 && fp16) faults->Add("fp16.enabled", "bf16.enabled", kTwo);
  if (config.torch_autocast().enabled() && (bf16 || fp16)) {
    faults->Add("torch_autocast.enabled",
                bf16 ? "bf16.enabled" : "fp16.enabled", kTwo);
  }
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
  CheckOneIsEnabled(*config, faults);
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
