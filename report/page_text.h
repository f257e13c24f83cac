// Words and numbers of a page: short, for people.
#ifndef REPORT_PAGE_TEXT_H_
#define REPORT_PAGE_TEXT_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Escapes text for an element or an attribute. Control characters and bytes
// that are not UTF-8, which XML may not hold, become U+FFFD.
std::string EscapeHtml(absl::string_view text);

// Returns a link to a file in the page's own folder, which EscapeHtml is still
// to be called for.
std::string LinkTo(absl::string_view file_name);

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
#endif  // REPORT_PAGE_TEXT_H_
