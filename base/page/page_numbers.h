// Writes numbers for people, short: those of pages and of the commands.
#ifndef BASE_PAGE_PAGE_NUMBERS_H_
#define BASE_PAGE_PAGE_NUMBERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns "1,234,567".
std::string CountText(int64_t count);

// Returns a number of at most `digits` significant digits: "1,230", "1.5M",
// "3.1e-4"; with unit "bytes" "12.3 MiB". No other unit is in the text.
std::string ShortNumber(double value, absl::string_view unit, int digits = 3);

// Returns the number and its unit: "385 ms", "12.3 MiB"; milliseconds from ten
// seconds on are a DurationText.
std::string Quantity(double value, absl::string_view unit, int digits = 3);

// Returns "0.5 s", "45 s", "12 min 5 s", "3 h 12 min" or "2 d 5 h".
std::string DurationText(double seconds);

// Returns values for the marks of an axis from `low` to `high`, some `count`.
std::vector<double> NiceTicks(double low, double high, int count);

// Returns a ShortNumber for each tick, with as many digits as tell them apart.
std::vector<std::string> TickTexts(const std::vector<double>& ticks,
                                   absl::string_view unit);

}  // namespace tessera
#endif  // BASE_PAGE_PAGE_NUMBERS_H_
