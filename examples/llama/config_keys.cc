#include "examples/llama/config_keys.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

using tessera::JsonKind;
using tessera::JsonValue;

void LlamaConfigKeys::Read(absl::string_view key, int64_t* out, int64_t least) {
  const JsonValue* const value = Find(key);
  if (value == nullptr) return;
  const std::optional<int64_t> number = value->AsInt64();
  if (number.has_value() && *number >= least && *number <= (1LL << 40)) {
    *out = *number;
  } else {
    Expected(*value, key, absl::StrCat("a whole number, ", least, " or more"));
  }
}

void LlamaConfigKeys::Read(absl::string_view key, double* out) {
  const JsonValue* const value = Find(key);
  if (value == nullptr) return;
  if (value->kind == JsonKind::kNumber && value->number > 0) {
    *out = value->number;
  } else {
    Expected(*value, key, "a number above 0");
  }
}

void LlamaConfigKeys::Read(absl::string_view key, bool* out) {
  const JsonValue* const value = Find(key);
  if (value == nullptr) return;
  if (value->kind == JsonKind::kBool) {
    *out = value->boolean;
  } else {
    Expected(*value, key, "true or false");
  }
}

const JsonValue* LlamaConfigKeys::Object(absl::string_view key) {
  const JsonValue* const value = Find(key);
  if (value != nullptr && value->kind != JsonKind::kObject) {
    Expected(*value, key, "an object");
    return nullptr;
  }
  return value;
}

std::string LlamaConfigKeys::OneOf(absl::string_view key,
                                   std::vector<std::string> words) {
  const JsonValue* const value = Find(key);
  if (value == nullptr) return words[0];
  if (value->kind != JsonKind::kString) {
    Expected(*value, key, "a word");
    return words[0];
  }
  for (const std::string& known : words) {
    if (value->text == known) return known;
  }
  if (status_.ok()) {
    status_ = absl::UnimplementedError(absl::StrCat(
        At(*value), ": ", key, ": \"", value->text,
        "\" is not supported here; expected ", absl::StrJoin(words, " or ")));
  }
  return words[0];
}

void LlamaConfigKeys::Usual(absl::string_view key, double usual) {
  const JsonValue* const value = Find(key);
  if (value == nullptr || !status_.ok()) return;
  if (value->kind == JsonKind::kNumber && value->number == usual) return;
  status_ = absl::UnimplementedError(
      absl::StrCat(At(*value), ": ", key, ": ", tessera::ToJsonText(*value),
                   " is not supported here; expected ", usual));
}

void LlamaConfigKeys::Refuse(const JsonValue& value, absl::string_view what) {
  if (status_.ok()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(At(value), ": ", what));
  }
}

const JsonValue* LlamaConfigKeys::Find(absl::string_view key) const {
  const JsonValue* const value =
      object_ == nullptr ? nullptr : object_->Find(key);
  return value == nullptr || value->kind == JsonKind::kNull ? nullptr : value;
}

std::string LlamaConfigKeys::At(const JsonValue& value) const {
  return tessera::FormatPosition(where_, value.position);
}

void LlamaConfigKeys::Expected(const JsonValue& value, absl::string_view key,
                               absl::string_view what) {
  Refuse(value, absl::StrCat(key, ": expected ", what, ", got ",
                             tessera::ToJsonText(value)));
}
