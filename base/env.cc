#include "base/env.h"

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

bool IsOneOf(absl::string_view text,
             std::initializer_list<absl::string_view> words) {
  for (absl::string_view word : words) {
    if (absl::EqualsIgnoreCase(text, word)) return true;
  }
  return false;
}

}  // namespace

std::optional<std::string> EnvString(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
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
  return absl::InvalidArgumentError(absl::StrCat(
      "environment variable ", name,
      ": expected 1, true, yes, on, 0, false, no or off, got '", *text, "'"));
}

}  // namespace tessera
