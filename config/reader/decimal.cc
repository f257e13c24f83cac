#include "config/reader/decimal.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

// Returns whether the digits before an exponent are not all zero.
bool HasDigitAboveZero(absl::string_view text) {
  return text.substr(0, text.find_first_of("eE")).find_first_of("123456789") !=
         text.npos;
}

}  // namespace

Decimal ReadDecimal(absl::string_view text, double* value) {
  double number = 0;
  if (!absl::SimpleAtod(text, &number)) return Decimal::kNone;
  if (std::isinf(number) && HasDigitAboveZero(text)) return Decimal::kTooLarge;
  if (number == 0) {
    if (HasDigitAboveZero(text)) return Decimal::kTooSmall;
    number = 0;  // not -0
  }
  *value = number;
  return Decimal::kRight;
}

std::string FaultOf(absl::string_view text, Decimal decimal) {
  constexpr size_t kMaxShown = 40;
  return absl::StrCat(
      "the number ", text.substr(0, kMaxShown),
      text.size() > kMaxShown ? "..." : "",
      decimal == Decimal::kTooLarge
          ? " is too large: a double is at most 1.8e308"
      : decimal == Decimal::kTooSmall
          ? " is too small: as a double it is 0; write 0 if that is meant"
          : " is none");
}

bool IsNoFiniteNumber(absl::string_view word) {
  for (const char* name : {"nan", "inf", "infinity"}) {
    if (absl::EqualsIgnoreCase(word, name)) return true;
  }
  return false;
}

}  // namespace tessera
