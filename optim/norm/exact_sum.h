// ExactSum: the sum of doubles without rounding, so that neither the order of
// additions nor how they are grouped has any influence on its bits.
//
//   digits_   [ d0 | d1 | ... | d67 ]   sum = (d0 + d1 2^32 + ...) 2^-1074
//
// A double's 53 bits fall into three digits at most; carries wait until the 64
// bits of a digit could overflow. 2^78 of the largest double fit.
// Threads: const methods may run concurrently; the others need outside order.
#ifndef OPTIM_NORM_EXACT_SUM_H_
#define OPTIM_NORM_EXACT_SUM_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

class ExactSum {
 public:
  // About 2 ns. REQUIRES: x is finite, its sign bit is 0.
  void Add(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const uint64_t exponent = bits >> 52;  // biased, 0 for subnormals
    const uint64_t hidden = uint64_t{exponent > 0} << 52;
    const uint64_t shift = exponent - (exponent > 0);
    const unsigned __int128 mantissa = bits - (exponent << 52) + hidden;
    const unsigned __int128 shifted = mantissa << (shift % 32);
    uint64_t* digit = &digits_[shift / 32];
    digit[0] += static_cast<uint32_t>(shifted);
    digit[1] += static_cast<uint32_t>(shifted >> 32);
    digit[2] += static_cast<uint64_t>(shifted >> 64);
    if (++addends_ == kMaxAddends) Carry();
  }
  void Add(const ExactSum& other);

  // Returns the nearest double, the even one of two that are equally near;
  // infinity from 2^1024 - 2^970.
  double Round() const;

  // The sum in units of 2^-1074 in lower-case hexadecimal, "0" if nothing was
  // added: equal sums have equal texts. At most 544 characters.
  std::string Text() const;
  // Parses Text's output. InvalidArgument says what was expected.
  static absl::StatusOr<ExactSum> Parse(absl::string_view text);

 private:
  static constexpr int kDigits = 68;
  // Two sums with that many addends each can be added without overflow.
  static constexpr uint64_t kMaxAddends = uint64_t{1} << 31;

  // Makes all digits less than 2^32.
  void Carry();

  std::array<uint64_t, kDigits> digits_ = {};  // each <= addends_ * (2^32 - 1)
  uint64_t addends_ = 0;                       // since the last carry
};

}  // namespace tessera
#endif  // OPTIM_NORM_EXACT_SUM_H_
