#include "optim/norm/exact_sum.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {
namespace {

constexpr int kDigitBits = 32;
constexpr int kDigitCharacters = 8;
constexpr int kUnitExponent = -1074;  // of the smallest subnormal

}  // namespace

void ExactSum::Carry() {
  for (int i = 0; i + 1 < kDigits; ++i) {
    digits_[i + 1] += digits_[i] >> kDigitBits;
    digits_[i] = static_cast<uint32_t>(digits_[i]);
  }
  addends_ = 1;
}

void ExactSum::Add(const ExactSum& other) {
  for (int i = 0; i < kDigits; ++i) digits_[i] += other.digits_[i];
  addends_ += other.addends_;
  if (addends_ >= kMaxAddends) Carry();
}

double ExactSum::Round() const {
  ExactSum sum = *this;
  sum.Carry();
  int top = kDigits - 1;
  while (top > 0 && sum.digits_[top] == 0) --top;
  // Three digits hold at least 65 significant bits, or the sum's last bit. What
  // is below them matters only in that it is not zero.
  const int last = std::max(top - 2, 0);
  unsigned __int128 leading = 0;
  for (int i = top; i >= last; --i) {
    leading = leading << kDigitBits | sum.digits_[i];
  }
  for (int i = 0; i < last; ++i) leading |= sum.digits_[i] != 0;
  // The conversion rounds to nearest even. The power of two is exact: a result
  // below 2^-1022 has all its bits above the unit.
  return std::ldexp(static_cast<double>(leading),
                    last * kDigitBits + kUnitExponent);
}

std::string ExactSum::Text() const {
  ExactSum sum = *this;
  sum.Carry();
  std::string text;
  for (int i = kDigits - 1; i >= 0; --i) {
    absl::StrAppendFormat(&text, "%08x", sum.digits_[i]);
  }
  return text.substr(std::min(text.find_first_not_of('0'), text.size() - 1));
}

absl::StatusOr<ExactSum> ExactSum::Parse(absl::string_view text) {
  const int characters = static_cast<int>(text.size());
  ExactSum sum;
  bool good = 0 < characters && characters <= kDigits * kDigitCharacters &&
              (text[0] != '0' || characters == 1);
  for (int i = 0; good && i < characters; ++i) {
    const char c = text[characters - 1 - i];
    good = absl::ascii_isdigit(c) || ('a' <= c && c <= 'f');
    const uint64_t value = absl::ascii_isdigit(c) ? c - '0' : c - 'a' + 10;
    sum.digits_[i / kDigitCharacters] |= value << (i % kDigitCharacters * 4);
  }
  if (!good) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected an exact sum, 1 to ", kDigits * kDigitCharacters,
        " digits of 0-9 and a-f without leading zeros, got '", text, "'"));
  }
  sum.addends_ = 1;
  return sum;
}

}  // namespace tessera
