#include "base/env.h"

#include <cmath>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

absl::Status Misfit(const char* name, absl::string_view expected,
                    absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("environment variable ", name,
                                                 ": expected ", expected,
                                                 ", got '", text, "'"));
}

bool IsOneOf(absl::string_view text,
             std::initializer_list<absl::string_view> words) {
  for (absl::string_view word : words) {
    if (absl::EqualsIgnoreCase(text, word)) return true;
  }
  return false;
}

std::string Describe(Int64Range range) {
  const Int64Range any;
  if (range.min == any.min && range.max == any.max) return "an integer";
  if (range.max == any.max) {
    return absl::StrCat("an integer of at least ", range.min);
  }
  if (range.min == any.min) {
    return absl::StrCat("an integer of at most ", range.max);
  }
  return absl::StrCat("an integer of ", range.min, " to ", range.max);
}

}  // namespace

std::optional<std::string> EnvString(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

absl::StatusOr<std::optional<int64_t>> EnvInt64(const char* name,
                                                Int64Range range) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<int64_t>();
  int64_t value = 0;
  if (!absl::SimpleAtoi(*text, &value) || value < range.min ||
      value > range.max) {
    return Misfit(name, Describe(range), *text);
  }
  return std::optional<int64_t>(value);
}

absl::StatusOr<std::optional<double>> EnvDouble(const char* name) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<double>();
  double value = 0;
  if (!absl::SimpleAtod(*text, &value) || !std::isfinite(value)) {
    return Misfit(name, "a finite number", *text);
  }
  return std::optional<double>(value);
}

absl::StatusOr<std::optional<bool>> EnvBool(const char* name) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<bool>();
  const absl::string_view word = absl::StripAsciiWhitespace(*text);
  if (IsOneOf(word, {"1", "true", "yes", "on"})) {
    return std::optional<bool>(true);
  }
  if (IsOneOf(word, {"0", "false", "no", "off"})) {
    return std::optional<bool>(false);
  }
  return Misfit(name, "1, true, yes, on, 0, false, no or off", *text);
}

absl::StatusOr<std::optional<absl::Duration>> EnvDuration(const char* name) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<absl::Duration>();
  double seconds = 0;
  absl::Duration value;
  if (absl::SimpleAtod(*text, &seconds)) {
    value = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(*text, &value)) {
    return Misfit(name, "a duration such as 30, 1.5s or 5m", *text);
  }
  if (std::isnan(seconds) || value < absl::ZeroDuration()) {
    return Misfit(name, "a duration of at least 0", *text);
  }
  return std::optional<absl::Duration>(value);
}

}  // namespace tessera
