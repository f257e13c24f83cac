#include "config/reader/json_keys.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/edit_distance.h"
#include "config/reader/json_options.pb.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// Adds the path of each key `key` in `schema`.
void Collect(const Descriptor& schema, absl::string_view key,
             const std::string& prefix, std::set<std::string>& found) {
  for (int i = 0; i < schema.field_count(); ++i) {
    const FieldDescriptor& field = *schema.field(i);
    const auto& options = field.options();
    if (options.HasExtension(proto::no_effect) ||
        options.HasExtension(proto::refused)) {
      continue;
    }
    if (HasJsonKey(field, key)) found.insert(absl::StrCat(prefix, key));
    if (field.message_type() == nullptr || field.is_repeated()) continue;
    Collect(*field.message_type(), key,
            absl::StrCat(prefix, JsonKeys(field)[0], "."), found);
  }
}

// Names of torch.optim's users, Hugging Face's TrainingArguments and
// Lightning's Trainer, and what they are here.
struct Synonym {
  absl::string_view theirs, key;
};
constexpr Synonym kSynonyms[] = {
    {"learning_rate", "lr"},
    {"clip_grad_norm", "gradient_clipping"},
    {"gradient_clip_val", "gradient_clipping"},
    {"accumulate_grad_batches", "gradient_accumulation_steps"},
    {"batch_size", "train_micro_batch_size_per_gpu"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"global_batch_size", "train_batch_size"},
    {"zero_stage", "stage"},
    {"lr_scheduler", "scheduler"},
    {"warmup_steps", "warmup_num_steps"},
};

}  // namespace

std::string KeyMeant(absl::string_view key) {
  for (const Synonym& synonym : kSynonyms) {
    if (synonym.theirs == key) return std::string(synonym.key);
  }
  return std::string(key);
}

std::vector<std::string> JsonKeys(const FieldDescriptor& field) {
  const auto& keys = field.options().GetRepeatedExtension(proto::json_key);
  if (keys.empty()) return {field.name()};
  return {keys.begin(), keys.end()};
}

bool IsCommentKey(absl::string_view key) {
  return absl::StartsWith(key, "_") || absl::StartsWith(key, "//") ||
         absl::StartsWith(key, "#") || key == "comment";
}

bool HasJsonKey(const FieldDescriptor& field, absl::string_view key) {
  const std::vector<std::string> keys = JsonKeys(field);
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool HasJsonKey(const Descriptor& level, absl::string_view key) {
  for (int i = 0; i < level.field_count(); ++i) {
    if (HasJsonKey(*level.field(i), key)) return true;
  }
  return false;
}

std::string FindKeyElsewhere(const Descriptor& schema, absl::string_view key) {
  std::set<std::string> found;  // two fields may have one key
  Collect(schema, key, "", found);
  return found.size() == 1 ? *found.begin() : "";
}

std::string FindNearestKey(const Descriptor& level, absl::string_view key) {
  std::vector<std::string> keys;
  for (int i = 0; i < level.field_count(); ++i) {
    for (std::string& candidate : JsonKeys(*level.field(i))) {
      keys.push_back(std::move(candidate));
    }
  }
  return NearestName(key, keys);
}

bool IsFreeForm(const FieldDescriptor& field) {
  return field.message_type() == proto::FreeForm::descriptor();
}

}  // namespace tessera
