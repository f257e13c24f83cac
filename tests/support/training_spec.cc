#include "tests/support/training_spec.h"

#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/env.h"
#include "c10/util/Exception.h"
#include "config/config.h"
#include "google/protobuf/text_format.h"
#include "verify/oracle_options.h"

namespace tessera {
namespace {

// Calls visit("name", &field) for each field; first those of what is computed.
template <typename Spec, typename Visit>
void VisitResult(Spec& spec, const Visit& visit) {
  visit("model", &spec.model);
  visit("steps", &spec.steps);
  visit("accumulation", &spec.accumulation);
  visit("optimizer", &spec.optimizer);
  visit("dtype", &spec.dtype);
  visit("fp32_norms", &spec.fp32_norms);
  visit("buffer_dtype", &spec.buffer_dtype);
  visit("reduce_dtype", &spec.reduce_dtype);
  visit("gradient_dtype", &spec.gradient_dtype);
  visit("narrow_masters", &spec.narrow_masters);
  visit("remainder_masters", &spec.remainder_masters);
  visit("accumulation_mode", &spec.accumulation_mode);
  visit("reduction", &spec.reduction);
  visit("predivide", &spec.predivide);
  visit("clipping", &spec.clipping);
  visit("clipping_norm", &spec.clipping_norm);
  visit("clipping_value", &spec.clipping_value);
  visit("adaptive", &spec.adaptive);
  visit("weights", &spec.weights);
  visit("check_overflow", &spec.check_overflow);
  visit("loss_scale", &spec.loss_scale);
  visit("initial_scale_power", &spec.initial_scale_power);
  visit("loss_scale_window", &spec.loss_scale_window);
  visit("hysteresis", &spec.hysteresis);
  visit("min_loss_scale", &spec.min_loss_scale);
  visit("shard_group", &spec.shard_group);
  visit("libtorch_exact", &spec.libtorch_exact);
  visit("libtorch_fused", &spec.libtorch_fused);
  visit("tensor", &spec.tensor);
  visit("sequence", &spec.sequence);
  visit("pipeline", &spec.pipeline);
  visit("split", &spec.split);
  visit("schedule", &spec.schedule);
  visit("cuts", &spec.cuts);
  visit("gradients", &spec.gradients);
  visit("outcomes", &spec.outcomes);
}

template <typename Spec, typename Visit>
void VisitWay(Spec& spec, const Visit& visit) {
  visit("stage", &spec.stage);
  visit("overlap", &spec.overlap);
  visit("reshard", &spec.reshard);
  visit("hpz", &spec.hpz);
  visit("shared", &spec.shared);
  visit("served", &spec.served);
  visit("prefetch_bucket_size", &spec.prefetch_bucket_size);
  visit("param_persistence_threshold", &spec.param_persistence_threshold);
  visit("max_live_parameters", &spec.max_live_parameters);
  visit("max_reuse_distance", &spec.max_reuse_distance);
  visit("reduce_bucket_size", &spec.reduce_bucket_size);
  visit("recompute", &spec.recompute);
  visit("activations", &spec.activations);
  visit("tier", &spec.tier);
  visit("states_on_disk", &spec.states_on_disk);
  visit("parameters_in_memory", &spec.parameters_in_memory);
  visit("parameters_tier", &spec.parameters_tier);
  visit("gradients_on_disk", &spec.gradients_on_disk);
  visit("moved", &spec.moved);
  visit("poison", &spec.poison);
  visit("device", &spec.device);
  visit("construct_budget", &spec.construct_budget);
  visit("more", &spec.more);
}

// Adds "name=value".
struct AddField {
  std::vector<std::string>* fields;
  void operator()(const char* name, const std::string* value) const {
    fields->push_back(absl::StrCat(name, "=", *value));
  }
  void operator()(const char* name, const double* value) const {
    fields->push_back(absl::StrCat(name, "=", HexFloat(*value)));
  }
  template <typename T>
  void operator()(const char* name, const T* value) const {
    fields->push_back(absl::StrCat(name, "=", int64_t{*value}));
  }
};

// Sets a field to its value, if it has one, and takes that away.
struct TakeField {
  std::map<std::string, std::string>* fields;
  template <typename T>
  void operator()(const char* name, T* value) const {
    auto field = fields->find(name);
    if (field == fields->end()) return;
    TORCH_CHECK(Parse(field->second, value), "TrainingSpec: ", name, "=",
                field->second);
    fields->erase(field);
  }

 private:
  static bool Parse(const std::string& text, std::string* value) {
    *value = text;
    return true;
  }
  static bool Parse(const std::string& text, bool* value) {
    return absl::SimpleAtob(text, value);
  }
  static bool Parse(const std::string& text, double* value) {
    const absl::StatusOr<double> parsed = ParseHexDouble(text);
    if (parsed.ok()) *value = *parsed;
    return parsed.ok();
  }
  template <typename T>
  static bool Parse(const std::string& text, T* value) {
    return absl::SimpleAtoi(text, value);
  }
};

void SetPrecision(const TrainingSpec& spec, proto::Config* config) {
  config->mutable_precision()->set_fp32_norms(spec.fp32_norms);
  config->mutable_precision()->set_libtorch_exact(spec.libtorch_exact);
  config->mutable_precision()->set_libtorch_fused(spec.libtorch_fused);
  if (!spec.buffer_dtype.empty()) {
    config->mutable_data_types()->set_buffer_dtype(spec.buffer_dtype);
  }
  if (spec.dtype == "bf16") {
    config->mutable_bf16()->set_enabled(true);
    config->mutable_bf16()->set_check_grad_overflow(spec.check_overflow);
  }
  if (spec.dtype != "fp16") return;
  proto::Fp16* fp16 = config->mutable_fp16();
  fp16->set_enabled(true);
  fp16->set_loss_scale(spec.loss_scale);
  fp16->set_initial_scale_power(spec.initial_scale_power);
  fp16->set_loss_scale_window(spec.loss_scale_window);
  fp16->set_hysteresis(spec.hysteresis);
  fp16->set_min_loss_scale(spec.min_loss_scale);
}

void SetRecompute(const std::string& text, proto::Config* config) {
  if (text.empty()) return;
  const std::vector<std::string> words = absl::StrSplit(text, '/');
  auto* const recompute = config->mutable_activation_checkpointing();
  recompute->add_units(words[0]);
  if (words.size() > 1) recompute->set_policy(words[1]);
  if (words.size() > 2) recompute->set_check(words[2]);
}

// Small units too, in slices that are smaller than some.
void SetOffload(const TrainingSpec& spec, proto::Config* config) {
  const std::string folder = TrainingSpec::SwapFolder();
  proto::ZeroOptimization* const zero = config->mutable_zero_optimization();
  if (spec.states_on_disk >= 0) {
    zero->mutable_offload_optimizer()->set_device(spec.tier);
    zero->mutable_offload_optimizer()->set_nvme_path(folder);
    if (spec.stage == 3) {
      zero->mutable_offload_optimizer()->set_ratio(spec.states_on_disk);
    }
  }
  if (spec.parameters_in_memory >= 0) {
    zero->mutable_offload_param()->set_device(
        spec.parameters_tier.empty() ? spec.tier : spec.parameters_tier);
    zero->mutable_offload_param()->set_nvme_path(folder);
    zero->mutable_offload_param()->set_max_in_cpu(spec.parameters_in_memory);
  }
  proto::OffloadTuning* const tuning =
      config->mutable_sharding()->mutable_offload();
  tuning->set_min_state_bytes(0);
  tuning->set_slice_numel(4096);
  tuning->set_checksums(true);
  tuning->set_gradients(spec.gradients_on_disk);
}

void SetSharding(const TrainingSpec& spec, proto::Config* config) {
  proto::Sharding* sharding = config->mutable_sharding();
  sharding->set_accumulation(spec.accumulation_mode);
  config->set_gradient_allreduce_op(spec.reduction);
  int group = 0;
  if (spec.reshard == "true" || spec.reshard == "false") {
    sharding->set_reshard_after_forward(spec.reshard == "true");
  } else if (absl::SimpleAtoi(spec.reshard, &group)) {
    sharding->set_reshard_group_size(group);
  }
  if (spec.shard_group > 0) sharding->set_shard_group_size(spec.shard_group);
  if (!spec.shared.empty()) sharding->set_shared_working_copy(spec.shared);
  if (!spec.served.empty()) sharding->set_served_gathers(spec.served);
  proto::ZeroOptimization* zero = config->mutable_zero_optimization();
  zero->set_stage(spec.stage);
  zero->set_overlap_comm(spec.overlap);
  if (spec.hpz != 1) zero->set_zero_hpz_partition_size(spec.hpz);
  const auto set = [&](int64_t value, auto setter) {
    if (value >= 0) (zero->*setter)(value);
  };
  using Zero = proto::ZeroOptimization;
  set(spec.prefetch_bucket_size, &Zero::set_stage3_prefetch_bucket_size);
  set(spec.param_persistence_threshold,
      &Zero::set_stage3_param_persistence_threshold);
  set(spec.max_live_parameters, &Zero::set_stage3_max_live_parameters);
  set(spec.max_reuse_distance, &Zero::set_stage3_max_reuse_distance);
  set(spec.reduce_bucket_size, &Zero::set_reduce_bucket_size);
}

proto::Optimizer OptimizerOf(const TrainingSpec& spec) {
  proto::Optimizer optimizer;
  TORCH_CHECK(
      google::protobuf::TextFormat::ParseFromString(spec.optimizer, &optimizer),
      "TrainingSpec: optimizer=", spec.optimizer);
  return optimizer;
}

// The form is the one that Verify reads.
void SetOptimizer(const TrainingSpec& spec, int world_size,
                  OracleOptions* options) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  *config.mutable_optimizer() = OptimizerOf(spec);
  config.mutable_precision()->set_libtorch_exact(spec.libtorch_exact);
  config.mutable_precision()->set_libtorch_fused(spec.libtorch_fused);
  const auto resolved = ResolveConfig(config, world_size);
  TORCH_CHECK(resolved.ok(), resolved.status().ToString());
  auto read = OracleOptionsOf(*resolved, world_size, /*stage=*/0);
  TORCH_CHECK(read.ok(), read.status().ToString());
  options->optimizer = read->optimizer;
  options->groups = std::move(read->groups);
}

std::optional<at::ScalarType> DtypeOf(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  TORCH_CHECK(name == "fp16", "no dtype ", name);
  return at::kHalf;
}

}  // namespace

std::string TrainingSpec::SwapFolder() {
  return absl::StrCat(EnvString("TEST_TMPDIR").value_or("/tmp"), "/swap");
}

std::string TrainingSpec::ToText() const {
  const TrainingSpec defaults;
  std::vector<std::string> fields, same, changed;
  VisitResult(*this, AddField{&fields});
  VisitWay(*this, AddField{&fields});
  VisitResult(defaults, AddField{&same});
  VisitWay(defaults, AddField{&same});
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i] != same[i]) changed.push_back(fields[i]);
  }
  return absl::StrJoin(changed, " ");
}

TrainingSpec TrainingSpec::FromText(absl::string_view text) {
  std::map<std::string, std::string> fields;
  for (absl::string_view field :
       absl::StrSplit(text, ' ', absl::SkipWhitespace())) {
    fields.insert(absl::StrSplit(field, absl::MaxSplits('=', 1)));
  }
  TrainingSpec spec;
  VisitResult(spec, TakeField{&fields});
  VisitWay(spec, TakeField{&fields});
  TORCH_CHECK(fields.empty(), "not a field of TrainingSpec: ",
              fields.empty() ? "" : fields.begin()->first);
  return spec;
}

at::Device TrainingSpec::OracleDevice() const {
  const bool own = device.empty() || absl::ascii_isdigit(device[0]);
  return own ? at::Device(at::kCPU) : at::Device(device);
}

std::string TrainingSpec::ResultText() const {
  TrainingSpec same = *this;
  if (stage == 0) same.shard_group = 0;
  std::vector<std::string> fields;
  VisitResult(same, AddField{&fields});
  return absl::StrJoin(fields, " ");
}

double WeightOf(int rank, int64_t micro_batch) {
  return static_cast<double>((micro_batch + 2 * rank) % 3);
}

proto::Config ConfigOf(const TrainingSpec& spec) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_accumulation_steps(spec.accumulation);
  config.set_gradient_clipping(spec.clipping);
  config.set_gradient_clipping_norm(spec.clipping_norm);
  config.set_gradient_clipping_value(spec.clipping_value);
  config.set_adaptive_gradient_clipping(spec.adaptive);
  config.set_gradient_predivide_factor(spec.predivide);
  if (!spec.reduce_dtype.empty()) {
    config.set_communication_data_type(spec.reduce_dtype);
  }
  if (!spec.gradient_dtype.empty()) {
    config.mutable_data_types()->set_grad_accum_dtype(spec.gradient_dtype);
  }
  if (spec.narrow_masters) {
    config.mutable_data_types()->set_master_dtype(spec.dtype);
  }
  if (spec.remainder_masters) {
    config.mutable_data_types()->set_master_dtype("fp32_remainder");
  }
  *config.mutable_optimizer() = OptimizerOf(spec);
  SetPrecision(spec, &config);
  SetSharding(spec, &config);
  SetRecompute(spec.recompute, &config);
  if (!spec.activations.empty()) {
    auto* const activations = config.mutable_activation_checkpointing();
    activations->set_offload(spec.activations);
    activations->set_nvme_path(TrainingSpec::SwapFolder());
    activations->set_offload_min_bytes(1);
  }
  SetOffload(spec, &config);
  config.mutable_tensor_parallel()->set_autotp_size(spec.tensor);
  config.set_sequence_parallel_size(spec.sequence);
  if (spec.pipeline > 1) {
    proto::Pipeline* const pipeline = config.mutable_pipeline();
    pipeline->set_stages(spec.pipeline);
    for (absl::string_view point : absl::StrSplit(spec.split, ';')) {
      if (!point.empty()) pipeline->add_split_points(std::string(point));
    }
    if (!spec.schedule.empty()) pipeline->set_schedule(spec.schedule);
  }
  TORCH_CHECK(google::protobuf::TextFormat::MergeFromString(spec.more, &config),
              "TrainingSpec: more=", spec.more);
  return config;
}

OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size) {
  OracleOptions options;
  options.tensor_ranks = spec.tensor;
  options.sequence_ranks = spec.sequence;
  world_size /= spec.tensor * spec.pipeline * spec.sequence;
  options.world_size = world_size;
  options.device = spec.OracleDevice();
  if (spec.stage > 0) options.shard_group_size = spec.shard_group;
  options.accumulation = spec.accumulation;
  options.model_seed = TrainingSpec::kModelSeed;
  options.rank_seed = TrainingSpec::kRankSeed;
  SetOptimizer(spec, world_size, &options);
  if (spec.dtype != "fp32") options.dtype = DtypeOf(spec.dtype);
  options.cast_inputs = options.dtype.has_value();  // as engines by default
  options.keep_norms = spec.fp32_norms;
  options.buffer_dtype = DtypeOf(spec.buffer_dtype);
  options.reduce_dtype = DtypeOf(spec.reduce_dtype);
  options.gradient_dtype = DtypeOf(spec.gradient_dtype);
  options.narrow_masters = spec.narrow_masters;
  options.ties_away = spec.remainder_masters;
  options.accumulate_locally = spec.accumulation_mode == "local";
  options.sum = spec.reduction == "sum";
  options.predivide = spec.predivide;
  options.max_norm = spec.clipping;
  options.norm_p = spec.clipping_norm;
  options.max_value = spec.clipping_value;
  options.adaptive = spec.adaptive;
  if (spec.weights) options.weight = WeightOf;
  if (spec.dtype == "bf16") options.skip_overflows = spec.check_overflow;
  if (spec.dtype == "fp16") {
    LossScaling& scaling = options.loss_scaling.emplace();
    scaling.dynamic = spec.loss_scale == 0;
    scaling.scale = scaling.dynamic ? std::ldexp(1, spec.initial_scale_power)
                                    : spec.loss_scale;
    scaling.window = spec.loss_scale_window;
    scaling.hysteresis = spec.hysteresis;
    scaling.min_scale = spec.min_loss_scale;
  }
  return options;
}

}  // namespace tessera
