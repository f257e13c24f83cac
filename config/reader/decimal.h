// Decimal text -> double, with what is lost.
#ifndef CONFIG_READER_DECIMAL_H_
#define CONFIG_READER_DECIMAL_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

enum class Decimal {
  kRight,  // the nearest double, or a zero that is written as one
  kNone,   // no number, or one of more digits than are read
  kTooLarge,
  kTooSmall,  // becomes 0, and is not
};

// "-1.5e3", as absl::SimpleAtod reads it, but for -0, which is 0 here. `value`
// is set with kRight alone. inf and nan are kRight.
Decimal ReadDecimal(absl::string_view text, double* value);

// "the number 1e400 is too large: ..." of one that is not kRight.
std::string FaultOf(absl::string_view text, Decimal decimal);

// NaN, Infinity and inf, in any case: what JSON cannot write.
bool IsNoFiniteNumber(absl::string_view word);

}  // namespace tessera
#endif  // CONFIG_READER_DECIMAL_H_
