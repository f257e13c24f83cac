// Charts of a page, as inline SVG: no script, no library. Colours and text are
// the page's style sheet's (report_page.cc), so that a page is light or dark.
#ifndef REPORT_SVG_CHART_H_
#define REPORT_SVG_CHART_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Any text as the text of an element or an attribute. What is no UTF-8 and
// control characters, which no XML may hold, become U+FFFD.
std::string EscapeHtml(absl::string_view text);

struct ChartLine {
  std::string name;
  std::vector<double> y;  // as long as the chart's x; not finite: a gap
};

struct Chart {
  std::string title;
  std::string unit;  // of y: "ms", "%", "bytes"; "" without one
  std::vector<double> x;
  std::vector<ChartLine> lines;
  bool stacked = false;    // areas on top of each other, of y >= 0
  bool from_zero = false;  // the axis begins at 0
  bool log_scale = false;  // where all y are above 0
};

// <figure class="chart">...</figure>, or "" where no line has a finite point.
std::string ChartToSvg(const Chart& chart);

// "1.5k", "12.3 MiB" with unit "bytes", "0.00031".
std::string ShortNumber(double value, absl::string_view unit);

// Values at which an axis from `low` to `high` has its marks, some `count`.
std::vector<double> NiceTicks(double low, double high, int count);

}  // namespace tessera
#endif  // REPORT_SVG_CHART_H_
