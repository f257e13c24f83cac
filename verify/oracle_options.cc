#include "verify/oracle_options.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.pb.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "verify/oracle_groups.h"
#include "verify/oracle_step.h"

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
  const std::string& states = config.optimizer().params().state_dtype();
  if (!states.empty() && states != "fp32" && states != "bf16") {
    return Unknown(absl::StrCat("optimizer.params.state_dtype ", states));
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

// Returns the algorithm of all parameters except Muon's matrices.
absl::StatusOr<std::string> AlgorithmOf(const proto::Optimizer& optimizer) {
  const std::string& type = optimizer.type();
  if (type == "Adam" || type == "AdamW") {
    return std::string(optimizer.params().adam_w_mode() ? "AdamW" : "Adam");
  }
  if (type == "Muon") return std::string("AdamW");
  if (OracleKnows(type)) return type;
  return Unknown(absl::StrCat("optimizer.type ", type));
}

// What `params` say, of the optimizer or of a group; the rest stays.
void SetOptions(const google::protobuf::Message& params, OracleStepOptions* o) {
  using google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& reflection = *params.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->name() == "betas" && reflection.FieldSize(params, field) == 2) {
      o->beta1 = reflection.GetRepeatedDouble(params, field, 0);
      o->beta2 = reflection.GetRepeatedDouble(params, field, 1);
    } else if (field->is_repeated()) {
      continue;
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
      SetOracleOption(field->name(), reflection.GetDouble(params, field), o);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      SetOracleOption(field->name(), reflection.GetBool(params, field), o);
    }
  }
}

// Those of hidden matrices, and of groups that ask for it.
OracleStepOptions MuonOf(const proto::OptimizerParams& params,
                         OracleStepOptions o) {
  o.algorithm = "Muon";
  o.lr = params.muon_lr();
  o.ns_steps = params.ns_steps();
  o.ns_gram = params.ns_method() == "gram";
  o.match_rms_adamw = params.adjust_lr_fn() == "match_rms_adamw";
  return o;
}

absl::Status SetOptimizer(const proto::Config& config, OracleOptions* o) {
  const proto::Optimizer& optimizer = config.optimizer();
  const proto::OptimizerParams& params = optimizer.params();
  OracleStepOptions& all = o->optimizer;
  TESSERA_ASSIGN_OR_RETURN(all.algorithm, AlgorithmOf(optimizer));
  SetOptions(params, &all);
  if (!params.has_eps()) all.eps = 0;  // Adafactor's: there is no number
  all.bf16_states = params.state_dtype() == "bf16";
  all.libtorch_exact = config.precision().libtorch_exact();
  all.libtorch_fused = config.precision().libtorch_fused();
  const bool has_muon = optimizer.type() == "Muon";
  if (has_muon) all.lr = params.adam_lr();
  for (const proto::ParamGroup& from : optimizer.param_groups()) {
    OracleGroup group;
    group.name = from.name();
    group.options = from.use_muon() ? MuonOf(params, all) : all;
    SetOptions(from.params(), &group.options);
    group.frozen = from.frozen();
    if (from.has_gradient_clipping()) group.max_norm = from.gradient_clipping();
    if (from.has_adaptive_gradient_clipping()) {
      group.adaptive = from.adaptive_gradient_clipping();
    }
    group.parameters = {from.parameters().begin(), from.parameters().end()};
    group.modules = {from.modules().begin(), from.modules().end()};
    o->groups.push_back(std::move(group));
  }
  if (optimizer.no_decay() == "auto") {
    OracleGroup group;
    group.name = "no_decay";
    group.options = all;
    group.options.weight_decay = 0;
    group.undecayed = true;
    o->groups.push_back(std::move(group));
  }
  if (has_muon) {
    OracleGroup group;
    group.name = "muon";
    group.options = MuonOf(params, all);
    group.hidden_matrices = true;
    o->groups.push_back(std::move(group));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OracleOptions> OracleOptionsOf(const proto::Config& config,
                                              int world_size, int stage) {
  TESSERA_RETURN_IF_ERROR(CheckKnown(config));
  OracleOptions o;
  o.tensor_ranks = static_cast<int>(
      std::max<int64_t>(1, config.tensor_parallel().autotp_size()));
  o.sequence_ranks =
      static_cast<int>(std::max<int64_t>(1, config.sequence_parallel_size()));
  world_size /=
      o.tensor_ranks * o.sequence_ranks *
      static_cast<int>(std::max<int64_t>(1, config.pipeline().stages()));
  o.world_size = world_size;
  o.accumulation = static_cast<int>(config.gradient_accumulation_steps());
  TESSERA_RETURN_IF_ERROR(SetOptimizer(config, &o));
  if (config.has_learning_rate_scaling()) {
    o.rate_factor = config.learning_rate_scaling().factor();
  }
  if (config.fp16().enabled()) o.dtype = at::kHalf;
  if (config.bf16().enabled()) o.dtype = at::kBFloat16;
  o.cast_inputs = o.dtype.has_value() && config.precision().cast_inputs();
  o.keep_norms = config.precision().fp32_norms();
  o.buffer_dtype = DtypeOf(config.data_types().buffer_dtype());
  if (config.has_communication_data_type()) {
    o.reduce_dtype = DtypeOf(config.communication_data_type());
  }
  const std::string& masters = config.data_types().master_dtype();
  o.narrow_masters = masters == "bf16" || masters == "fp16";
  o.ties_away = masters == "fp32_remainder";
  if (config.data_types().has_grad_accum_dtype()) {
    o.gradient_dtype = DtypeOf(config.data_types().grad_accum_dtype());
  }
  o.half = config.torch_autocast().enabled() &&
           DtypeOf(config.torch_autocast().dtype()) == at::kHalf;
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
  o.max_value = config.gradient_clipping_value();
  o.norm_p = config.gradient_clipping_norm();
  o.adaptive = config.adaptive_gradient_clipping();
  if (config.has_adaptive_gradient_clipping_eps()) {
    o.adaptive_eps = config.adaptive_gradient_clipping_eps();
  }
  return o;
}

}  // namespace tessera
