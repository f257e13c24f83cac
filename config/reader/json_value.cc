// Uses JSON values once they are read.
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "config/reader/json_reader.h"

namespace tessera {

absl::string_view JsonKindName(JsonKind kind) {
  switch (kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return "a boolean";
    case JsonKind::kNumber:
      return "a number";
    case JsonKind::kString:
      return "a string";
    case JsonKind::kArray:
      return "an array";
    case JsonKind::kObject:
      return "an object";
  }
  return "?";
}

std::string ToJsonText(const JsonValue& value) {
  switch (value.kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return value.boolean ? "true" : "false";
    case JsonKind::kNumber:
      return value.text;
    case JsonKind::kString:
      return QuoteJson(value.text);
    case JsonKind::kArray:
      return absl::StrCat(
          "[",
          absl::StrJoin(value.elements, ", ",
                        [](std::string* out, const JsonValue& element) {
                          absl::StrAppend(out, ToJsonText(element));
                        }),
          "]");
    case JsonKind::kObject:
      return absl::StrCat(
          "{",
          absl::StrJoin(value.members, ", ",
                        [](std::string* out, const JsonMember& member) {
                          absl::StrAppend(out, QuoteJson(member.key), ": ",
                                          ToJsonText(member.value));
                        }),
          "}");
  }
  return "";
}

std::string FormatPosition(absl::string_view file_name, JsonPosition position) {
  if (position.line == kOverride.line) {
    return position.column == kOverride.column ? "--set" : "TrainingConfig";
  }
  return absl::StrCat(file_name, ":", position.line, ":", position.column);
}

std::optional<int64_t> JsonValue::AsInt64() const {
  if (kind != JsonKind::kNumber) return std::nullopt;
  // Splits the number into digits * 10^exponent, without zeros at the end of
  // the digits.
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(absl::ByAnyChar("eE"), 1));
  if (number == 0) return 0;  // whatever its exponent
  absl::string_view power = parts.second;
  absl::ConsumePrefix(&power, "+");
  int64_t exponent = 0;
  if (!power.empty() && !absl::SimpleAtoi(power, &exponent)) {
    return std::nullopt;
  }
  std::string digits(parts.first);
  const size_t point = digits.find('.');
  if (point != digits.npos) {
    exponent -= static_cast<int64_t>(digits.size() - point - 1);
    digits.erase(point, 1);
  }
  while (digits.size() > 1 && digits.back() == '0' && exponent < 0) {
    digits.pop_back();
    ++exponent;
  }
  int64_t exact = 0;
  if (!absl::SimpleAtoi(digits, &exact)) return std::nullopt;
  if (exponent < 0 || exponent > 18) return std::nullopt;
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(exact, int64_t{10}, &exact)) return std::nullopt;
  }
  return exact;
}

const JsonValue* JsonValue::Find(absl::string_view key) const {
  for (const JsonMember& member : members) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

double JsonValue::NumberAt(absl::string_view key, double otherwise) const {
  const JsonValue* const value =
      kind == JsonKind::kObject ? Find(key) : nullptr;
  return value != nullptr && value->kind == JsonKind::kNumber ? value->number
                                                              : otherwise;
}

std::string JsonValue::TextAt(absl::string_view key) const {
  const JsonValue* const value =
      kind == JsonKind::kObject ? Find(key) : nullptr;
  return value != nullptr && value->kind == JsonKind::kString ? value->text
                                                              : "";
}

}  // namespace tessera
