#include "config/training/training_config.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/page/number_text.h"

namespace tessera {
namespace {

std::string ValueOf(double value) { return NumberText(value); }
std::string ValueOf(int64_t value) { return absl::StrCat(value); }
std::string ValueOf(int value) { return absl::StrCat(value); }
std::string ValueOf(bool value) { return value ? "true" : "false"; }
std::string ValueOf(const std::string& value) { return QuoteJson(value); }

template <typename T>
std::string ListOf(const std::vector<T>& values) {
  return absl::StrCat("[",
                      absl::StrJoin(values, ", ",
                                    [](std::string* out, const T& value) {
                                      absl::StrAppend(out, ValueOf(value));
                                    }),
                      "]");
}

class Keys {
 public:
  template <typename T>
  void Add(absl::string_view key, const std::optional<T>& value) {
    if (value.has_value()) Set(key, ValueOf(*value));
  }
  void Add(absl::string_view key, const std::string& value) {
    if (!value.empty()) Set(key, ValueOf(value));
  }
  template <typename T>
  void Add(absl::string_view key, const std::vector<T>& values) {
    if (!values.empty()) Set(key, ListOf(values));
  }
  std::vector<std::string> Take() { return std::move(keys_); }

 private:
  void Set(absl::string_view key, const std::string& value) {
    keys_.push_back(absl::StrCat(key, "=", value));
  }
  std::vector<std::string> keys_;
};

void AddOffload(const TrainingConfig::Offload& offload, Keys* keys) {
  for (const auto& [section, device] :
       {std::pair("offload_optimizer", offload.optimizer),
        std::pair("offload_param", offload.parameters)}) {
    const std::string path = absl::StrCat("zero_optimization.", section);
    keys->Add(absl::StrCat(path, ".device"), device);
    if (device != "nvme") continue;
    keys->Add(absl::StrCat(path, ".nvme_path"), offload.nvme_path);
  }
}

}  // namespace

std::vector<std::string> KeysOf(const TrainingConfig& config) {
  Keys keys;
  keys.Add("zero_optimization.stage", config.stage);
  keys.Add("train_batch_size", config.batch);
  keys.Add("train_micro_batch_size_per_gpu", config.micro_batch);
  keys.Add("gradient_accumulation_steps", config.accumulation);
  keys.Add("bf16.enabled", config.bf16);
  keys.Add("fp16.enabled", config.fp16);
  keys.Add("optimizer.type", config.optimizer.type);
  keys.Add("optimizer.params.lr", config.optimizer.lr);
  keys.Add("optimizer.params.betas", config.optimizer.betas);
  keys.Add("optimizer.params.eps", config.optimizer.eps);
  keys.Add("optimizer.params.weight_decay", config.optimizer.weight_decay);
  keys.Add("optimizer.no_decay", config.optimizer.no_decay);
  keys.Add("gradient_clipping", config.gradient_clipping);
  keys.Add("scheduler.type", config.schedule.type);
  keys.Add("scheduler.params.warmup_num_steps", config.schedule.warmup_steps);
  keys.Add("scheduler.params.total_num_steps", config.schedule.total_steps);
  AddOffload(config.offload, &keys);
  keys.Add("activation_checkpointing.units", config.recompute);
  keys.Add("checkpoint.folder", config.checkpoints.folder);
  keys.Add("checkpoint.every_steps", config.checkpoints.every_steps);
  keys.Add("checkpoint.every_minutes", config.checkpoints.every_minutes);
  keys.Add("checkpoint.keep_last", config.checkpoints.keep_last);
  keys.Add("checkpoint.async", config.checkpoints.async);
  keys.Add("steps_per_print", config.steps_per_print);
  return keys.Take();
}

}  // namespace tessera
