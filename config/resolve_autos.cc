#include "config/resolve_autos.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/config.pb.h"
#include "config/reader/field_path.h"

namespace tessera {
namespace {

constexpr char kMicro[] = "train_micro_batch_size_per_gpu";
constexpr char kSteps[] = "gradient_accumulation_steps";
constexpr char kTrain[] = "train_batch_size";

// Describes a key that "auto" may stand for.
struct Rule {
  const char* path;
  std::vector<const char*> needs;  // names of AutoValues
};

const std::vector<Rule>& Rules() {
  static const auto* const rules = new std::vector<Rule>{
      {kMicro, {"per_device_train_batch_size"}},
      {kSteps, {"gradient_accumulation_steps"}},
      {kTrain, {"per_device_train_batch_size"}},
      {"gradient_clipping", {"max_grad_norm"}},
      {"optimizer.params.lr", {"learning_rate"}},
      {"optimizer.params.betas", {"adam_beta1", "adam_beta2"}},
      {"optimizer.params.eps", {"adam_epsilon"}},
      {"optimizer.params.weight_decay", {"weight_decay"}},
      {"scheduler.params.warmup_min_lr", {"learning_rate"}},
      {"scheduler.params.warmup_max_lr", {"learning_rate"}},
      {"scheduler.params.warmup_num_steps", {"warmup_steps"}},
      {"scheduler.params.total_num_steps", {"max_steps"}},
      {"bf16.enabled", {"bf16"}},
      {"fp16.enabled", {"fp16"}},
      {"zero_optimization.reduce_bucket_size", {"hidden_size"}},
      {"zero_optimization.stage3_prefetch_bucket_size", {"hidden_size"}},
      {"zero_optimization.stage3_param_persistence_threshold", {"hidden_size"}},
  };
  return *rules;
}

// Returns whether num_train_epochs gives the steps, as with Hugging Face's
// default of max_steps, -1. Only a program that has the data can convert epochs
// into steps.
bool IsOfEpochs(int64_t max_steps) { return max_steps <= 0; }

// Returns the values as a configuration: what each "auto" would become. `file`
// is what was written.
proto::Config Filled(const AutoValues& values, const proto::Config& file,
                     int world_size) {
  proto::Config c;
  if (values.per_device_train_batch_size) {
    c.set_train_micro_batch_size_per_gpu(*values.per_device_train_batch_size);
    const int64_t micro = file.has_train_micro_batch_size_per_gpu()
                              ? file.train_micro_batch_size_per_gpu()
                              : *values.per_device_train_batch_size;
    const int64_t steps = file.has_gradient_accumulation_steps()
                              ? file.gradient_accumulation_steps()
                              : values.gradient_accumulation_steps.value_or(1);
    int64_t train = 0;
    if (!__builtin_mul_overflow(micro, steps, &train) &&
        !__builtin_mul_overflow(train, int64_t{world_size}, &train)) {
      c.set_train_batch_size(train);
    }
  }
  if (values.gradient_accumulation_steps) {
    c.set_gradient_accumulation_steps(*values.gradient_accumulation_steps);
  }
  if (values.max_grad_norm) c.set_gradient_clipping(*values.max_grad_norm);
  proto::OptimizerParams* adam = c.mutable_optimizer()->mutable_params();
  proto::SchedulerParams* schedule = c.mutable_scheduler()->mutable_params();
  if (values.learning_rate) {
    adam->set_lr(*values.learning_rate);
    schedule->set_warmup_max_lr(*values.learning_rate);
    schedule->set_warmup_min_lr(0);
  }
  if (values.adam_beta1 && values.adam_beta2) {
    adam->add_betas(*values.adam_beta1);
    adam->add_betas(*values.adam_beta2);
  }
  if (values.adam_epsilon) adam->set_eps(*values.adam_epsilon);
  if (values.weight_decay) adam->set_weight_decay(*values.weight_decay);
  if (values.warmup_steps) schedule->set_warmup_num_steps(*values.warmup_steps);
  if (values.max_steps && !IsOfEpochs(*values.max_steps)) {
    schedule->set_total_num_steps(*values.max_steps);
  }
  if (values.bf16 || values.fp16) {
    c.mutable_bf16()->set_enabled(values.bf16.value_or(false));
    c.mutable_fp16()->set_enabled(values.fp16.value_or(false));
  }
  // Larger sizes would overflow counts.
  constexpr int64_t kMostHidden = int64_t{1} << 30;
  if (values.hidden_size && *values.hidden_size <= kMostHidden &&
      *values.hidden_size > 0) {
    proto::ZeroOptimization* zero = c.mutable_zero_optimization();
    const int64_t h = *values.hidden_size;
    zero->set_reduce_bucket_size(h * h);
    zero->set_stage3_prefetch_bucket_size(
        static_cast<int64_t>(0.9 * static_cast<double>(h * h)));
    zero->set_stage3_param_persistence_threshold(10 * h);
  }
  return c;
}

// Returns whether DeepSpeed replaces "auto" by the default in the path's
// section.
bool HasDefaultThere(absl::string_view path) {
  return absl::StrContains(path, '.') &&
         !absl::StartsWith(path, "optimizer.") &&
         !absl::StartsWith(path, "scheduler.");
}

void Unresolved(const std::string& path, const Rule* rule,
                const AutoValues& values, Faults* faults) {
  std::string needs = rule == nullptr
                          ? ""
                          : absl::StrCat(absl::StrJoin(rule->needs, " and "),
                                         " (tessera::AutoValues, or --auto)");
  if (path == "scheduler.params.total_num_steps" && values.max_steps) {
    absl::StrAppend(&needs, ", and ", *values.max_steps,
                    " leaves it to num_train_epochs: give the optimizer steps "
                    "of the run, epochs * batches of one / "
                    "gradient_accumulation_steps");
  }
  if (HasDefaultThere(path)) {
    faults->Note(path, "\"auto\" is its default here",
                 needs.empty() ? "" : ": to resolve it needs ", needs);
  } else if (rule != nullptr) {
    faults->Add(path, "\"auto\" needs ", needs);
  } else {
    faults->Add(path, "no rule says what \"auto\" is here: write the value");
  }
}

// Leaves the micro-batch to the engine if the batch's size is given, and
// removes from `autos` what that settles.
void LeaveMicroBatch(const proto::Config& filled, std::set<std::string>* autos,
                     proto::Config* config) {
  const bool left =
      autos->count(kMicro) > 0 && !HasField(filled, kMicro) &&
      config->has_train_batch_size() &&
      (autos->count(kSteps) > 0 ? !HasField(filled, kSteps)
                                : !config->has_gradient_accumulation_steps());
  if (!left) return;
  autos->erase(kMicro);
  autos->erase(kSteps);
  config->set_auto_micro_batch(true);
}

}  // namespace

void ResolveAutos(const ReadRecord& record, const AutoValues& values,
                  int world_size, proto::Config* config, Faults* faults) {
  const proto::Config filled = Filled(values, *config, world_size);
  std::set<std::string> autos(record.autos.begin(), record.autos.end());
  LeaveMicroBatch(filled, &autos, config);
  for (const Rule& rule : Rules()) {
    const bool known = HasField(filled, rule.path);
    if (autos.erase(rule.path) == 0) {
      if (known && faults->IsWritten(rule.path) &&
          HasField(*config, rule.path) &&
          FieldText(*config, rule.path) != FieldText(filled, rule.path)) {
        faults->Note(rule.path, "is ", FieldText(*config, rule.path),
                     " here, and ", FieldText(filled, rule.path), " by ",
                     absl::StrJoin(rule.needs, " and "),
                     ": what is written here counts");
      }
    } else if (known) {
      CopyField(filled, rule.path, config);
    } else {
      Unresolved(rule.path, &rule, values, faults);
    }
  }
  for (const std::string& path : autos) {
    Unresolved(path, nullptr, values, faults);
  }
}

}  // namespace tessera
