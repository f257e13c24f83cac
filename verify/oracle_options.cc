#include "verify/oracle_options.h"

#include <cmath>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

absl::Status Unknown(absl::string_view key) {
  return absl::UnimplementedError(
      absl::StrCat("Verify: plain training, to compare with, does not know ",
                   key, "; leave it out of the configuration to verify"));
}

absl::Status CheckKnown(const proto::Config& config) {
  if (!config.has_optimizer()) {
    return absl::FailedPreconditionError(
        "Verify: the configuration names no optimizer");
  }
  if (config.sharding().ignored_parameters_size() > 0) {
    return Unknown("sharding.ignored_parameters");
  }
  if (config.precision().fp32_classes_size() > 0) {
    return Unknown("precision.fp32_classes");
  }
  if (config.sharding().buffer_sync() != "local") {
    return Unknown("sharding.buffer_sync");
  }
  if (config.scheduler().params().cycle_momentum()) {
    return Unknown("scheduler.params.cycle_momentum, which changes betas");
  }
  return absl::OkStatus();
}

std::optional<at::ScalarType> DtypeOf(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  if (lower == "fp16" || lower == "float16") return at::kHalf;
  if (lower == "fp32" || lower == "float32") return at::kFloat;
  if (lower == "bf16" || lower == "bfloat16") return at::kBFloat16;
  return std::nullopt;
}

LossScaling ScalingOf(const proto::Fp16& fp16) {
  LossScaling scaling;
  scaling.dynamic = fp16.loss_scale() == 0;
  scaling.scale =
      scaling.dynamic
          ? std::ldexp(1, static_cast<int>(fp16.initial_scale_power()))
          : fp16.loss_scale();
  scaling.window = fp16.loss_scale_window();
  scaling.hysteresis = fp16.hysteresis();
  scaling.consecutive_hysteresis = fp16.consecutive_hysteresis();
  scaling.min_scale = static_cast<double>(fp16.min_loss_scale());
  return scaling;
}

}  // namespace

absl::StatusOr<OracleOptions> OracleOptionsOf(const proto::Config& config,
                                              int world_size, int stage) {
  TESSERA_RETURN_IF_ERROR(CheckKnown(config));
  OracleOptions o;
  o.world_size = world_size;
  o.accumulation = static_cast<int>(config.gradient_accumulation_steps());
  const proto::OptimizerParams& params = config.optimizer().params();
  o.lr = params.lr();
  o.beta1 = params.betas(0);
  o.beta2 = params.betas(1);
  o.eps = params.eps();
  o.weight_decay = params.weight_decay();
  if (config.fp16().enabled()) o.dtype = at::kHalf;
  if (config.bf16().enabled()) o.dtype = at::kBFloat16;
  o.cast_inputs = o.dtype.has_value() && config.precision().cast_inputs();
  o.libtorch_exact = config.precision().libtorch_exact();
  o.keep_norms = config.precision().fp32_norms();
  o.buffer_dtype = DtypeOf(config.data_types().buffer_dtype());
  if (config.has_communication_data_type()) {
    o.reduce_dtype = DtypeOf(config.communication_data_type());
  }
  o.accumulate_locally = config.sharding().accumulation() == "local";
  if (stage > 0) o.shard_group_size = config.sharding().shard_group_size();
  o.sum = config.gradient_allreduce_op() == "sum";
  o.predivide = config.prescale_gradients()
                    ? world_size
                    : config.gradient_predivide_factor();
  if (config.fp16().enabled()) o.loss_scaling = ScalingOf(config.fp16());
  o.skip_overflows =
      config.bf16().enabled() && config.bf16().check_grad_overflow();
  o.max_norm = config.gradient_clipping();
  o.norm_p = config.gradient_clipping_norm();
  return o;
}

}  // namespace tessera
