#include <string>

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

}  // namespace

void ResolvePrecision(proto::Config* config, Faults* faults) {
  FillDefaults(config->mutable_bf16());
  FillDefaults(config->mutable_fp16());
  FillDefaults(config->mutable_torch_autocast());
  CheckOneIsEnabled(*config, faults);
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
