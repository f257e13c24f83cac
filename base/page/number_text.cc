#include "base/page/number_text.h"

#include <charconv>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace tessera {

std::string NumberText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  constexpr double kWhole = 1e15;
  if (std::abs(value) < kWhole && std::trunc(value) == value &&
      !(value == 0 && std::signbit(value))) {
    return absl::StrCat(static_cast<int64_t>(value));  // 100000, not 1e+05
  }
  // Numbers do not depend on the locale.
  char text[40];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

std::string JsonNumberText(double value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  return NumberText(value);
}

}  // namespace tessera
