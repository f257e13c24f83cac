// Reads decimal text as a double and reports what is lost.
#ifndef CONFIG_READER_DECIMAL_H_
#define CONFIG_READER_DECIMAL_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

enum class Decimal {
  kRight,  // the nearest double, or a zero that is written as one
  kNone,   // no number, or one of more digits than are read
  kTooLarge,
  kTooSmall,  // becomes 0, though it is not written as 0
};

// Reads "-1.5e3" and so on as absl::SimpleAtod does, except for -0, which is 0
// here. Sets `value` for kRight only. inf and nan are kRight.
Decimal ReadDecimal(absl::string_view text, double* value);

// Returns "the number 1e400 is too large: ..." for a text that is not kRight.
std::string FaultOf(absl::string_view text, Decimal decimal);

// Returns whether it is NaN, Infinity or inf, in any case, which JSON cannot
// write.
bool IsNoFiniteNumber(absl::string_view word);

}  // namespace tessera
#endif  // CONFIG_READER_DECIMAL_H_
