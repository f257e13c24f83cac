#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

// "BF16" becomes "bf16".
void ResolveDtype(const std::string& path, std::string* dtype, Faults* faults) {
  const std::string lower = absl::AsciiStrToLower(*dtype);
  if (lower == "fp16" || lower == "bf16" || lower == "fp32") *dtype = lower;
  faults->CheckOneOf(path, *dtype, {"fp16", "bf16", "fp32"});
}

void ResolveFp16(proto::Fp16* fp16, Faults* faults) {
  FillDefaults(fp16);
  faults->CheckAtLeast0("fp16.loss_scale", fp16->loss_scale());
  if (fp16->initial_scale_power() < 0 || fp16->initial_scale_power() > 127) {
    faults->Add("fp16.initial_scale_power", "expected 0 to 127, got ",
                fp16->initial_scale_power());
  }
  faults->CheckAtLeast("fp16.loss_scale_window", fp16->loss_scale_window(), 1);
  faults->CheckAtLeast("fp16.hysteresis", fp16->hysteresis(), 1);
  faults->CheckAtLeast("fp16.min_loss_scale", fp16->min_loss_scale(), 1);
}

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

void ResolveDataTypes(proto::DataTypes* types, Faults* faults) {
  FillDefaults(types);
  const std::string& dtype = types->grad_accum_dtype();
  if (absl::AsciiStrToLower(dtype) == "fp32") {
    types->set_grad_accum_dtype("fp32");
  } else {
    faults->Add("data_types.grad_accum_dtype", "expected fp32, got '",
                absl::Utf8SafeCEscape(dtype),
                "': micro-batches are always added in float32 here");
  }
}

}  // namespace

void ResolvePrecision(proto::Config* config, Faults* faults) {
  FillDefaults(config->mutable_bf16());
  ResolveFp16(config->mutable_fp16(), faults);
  FillDefaults(config->mutable_torch_autocast());
  faults->CheckOneOf("torch_autocast.dtype", config->torch_autocast().dtype(),
                     {"bfloat16", "float16"});
  CheckOneIsEnabled(*config, faults);
  if (config->has_communication_data_type()) {
    ResolveDtype("communication_data_type",
                 config->mutable_communication_data_type(), faults);
  }
  ResolveDataTypes(config->mutable_data_types(), faults);
  proto::Precision& precision = *config->mutable_precision();
  FillDefaults(&precision);
  if (precision.has_buffer_dtype()) {
    ResolveDtype("precision.buffer_dtype", precision.mutable_buffer_dtype(),
                 faults);
  }
  faults->CheckNoneEmpty("precision.fp32_classes", precision.fp32_classes());
  if (config->fp16().auto_cast() && !precision.cast_inputs()) {
    faults->Add("precision.cast_inputs",
                "false contradicts fp16.auto_cast, which is true");
  }
}

}  // namespace tessera
