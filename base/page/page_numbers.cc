#include "base/page/page_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {
namespace {

// Trims "12.30" to "12.3" and "4.00" to "4".
std::string Trimmed(std::string digits) {
  if (digits.find('.') == std::string::npos) return digits;
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return digits;
}

// Returns the power of ten of the first digit. REQUIRES: value is not 0.
int PowerOf(double value) {
  return static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-12));
}

// Formats what is less than 1e15 and not less than 1e-3.
std::string Plain(double value, int digits) {
  const int decimals = digits - 1 - PowerOf(value);
  if (decimals >= 0) {
    std::string text = absl::StrFormat("%.*f", decimals, std::abs(value));
    if (std::min(text.find('.'), text.size()) <= 3) {
      return absl::StrCat(value < 0 ? "-" : "", Trimmed(std::move(text)));
    }
  }
  const double unit = std::pow(10.0, std::max(0, -decimals));
  const double rounded = std::round(value / unit) * unit;
  if (decimals <= 0) return CountText(static_cast<int64_t>(rounded));
  const double whole = std::trunc(value);
  const std::string rest =
      Trimmed(absl::StrFormat("%.*f", decimals, std::abs(value - whole)));
  if (rest[0] != '0') return CountText(static_cast<int64_t>(std::round(value)));
  return absl::StrCat(CountText(static_cast<int64_t>(whole)), rest.substr(1));
}

std::string WithPrefix(double value, double base, int digits,
                       const std::array<const char*, 6>& prefixes) {
  size_t i = 0;
  while (std::abs(value) >= base && i + 1 < prefixes.size()) {
    value /= base;
    ++i;
  }
  return absl::StrCat(std::abs(value) < 1e-3
                          ? absl::StrFormat("%.2g", value)
                          : Plain(value, std::max(digits, 1)),
                      prefixes[i]);
}

}  // namespace

std::string CountText(int64_t count) {
  std::string text = absl::StrCat(count);
  for (size_t at = text.size(); at > (count < 0 ? 4u : 3u); at -= 3) {
    text.insert(at - 3, ",");
  }
  return text;
}

std::string ShortNumber(double value, absl::string_view unit, int digits) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "infinite" : "-infinite";
  if (value == 0) return unit == "bytes" ? "0 B" : "0";
  if (unit == "bytes") {
    return WithPrefix(value, 1024, digits,
                      {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
  }
  const double size = std::abs(value);
  if (size >= 1e15 || size < 1e-3) {
    const std::string text = absl::StrFormat("%.*e", digits - 1, value);
    const size_t e = text.find('e');
    const size_t first = text.find_first_not_of("+-0", e + 1);
    return absl::StrCat(Trimmed(text.substr(0, e)), "e",
                        text[e + 1] == '-' ? "-" : "", text.substr(first));
  }
  if (size >= 1e6 && digits <= 6) {
    return WithPrefix(value, 1000, digits, {"", "k", "M", "G", "T", "P"});
  }
  return Plain(value, digits);
}

std::string Quantity(double value, absl::string_view unit, int digits) {
  if (unit == "ms" && std::abs(value) >= 1e4 && std::isfinite(value)) {
    return DurationText(value / 1000);
  }
  const std::string number = ShortNumber(value, unit, digits);
  if (unit.empty() || unit == "bytes") return number;
  return absl::StrCat(number, " ", unit);
}

std::string DurationText(double seconds) {
  if (!(std::abs(seconds) < 1e15)) return ShortNumber(seconds, "");
  if (seconds < 59.5) {
    return absl::StrCat(seconds < 10 ? ShortNumber(seconds, "", 2)
                                     : absl::StrFormat("%.0f", seconds),
                        " s");
  }
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const auto of = [&](int64_t large, const char* large_name, int64_t small,
                      const char* small_name) {
    const int64_t rest = whole % large / small;
    return absl::StrCat(CountText(whole / large), large_name,
                        rest == 0 ? "" : absl::StrCat(" ", rest, small_name));
  };
  if (whole < 3600) return of(60, " min", 1, " s");
  if (whole < 86400) return of(3600, " h", 60, " min");
  return of(86400, " d", 3600, " h");
}

std::vector<double> NiceTicks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low) || count < 1) return ticks;
  const double raw = (high - low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) {
      step = factor * power;
      break;
    }
  }
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<int64_t>(std::floor(high / step + 1e-9));
  for (int64_t i = first; i <= last; ++i) {
    ticks.push_back(static_cast<double>(i) * step);
  }
  return ticks;
}

std::vector<std::string> TickTexts(const std::vector<double>& ticks,
                                   absl::string_view unit) {
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (size_t i = 0; i < ticks.size(); ++i) {
    most = std::max(most, std::abs(ticks[i]));
    if (i > 0) least = std::min(least, std::abs(ticks[i] - ticks[i - 1]));
  }
  int digits = 3;
  if (most > 0 && least > 0 && std::isfinite(least)) {
    digits = std::clamp(PowerOf(most) - PowerOf(least) + 1, 3, 15);
  }
  std::vector<std::string> texts;
  texts.reserve(ticks.size());
  for (const double tick : ticks) {
    texts.push_back(ShortNumber(tick, unit, digits));
  }
  return texts;
}

}  // namespace tessera
