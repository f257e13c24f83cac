// Draws charts of a page as inline SVG, without script or library. Colours and
// text follow the page's style sheet (report_page.cc), so that a page is light
// or dark.
#ifndef REPORT_SVG_CHART_H_
#define REPORT_SVG_CHART_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Escapes text for an element or an attribute. Control characters and bytes
// that are not UTF-8, which XML may not hold, become U+FFFD.
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
  bool log_scale = false;  // used if all y are above 0
};

// Returns <figure class="chart">...</figure>, or "" if no line has a finite
// point.
std::string ChartToSvg(const Chart& chart);

// Returns "1.5k", "12.3 MiB" with unit "bytes", "0.00031".
std::string ShortNumber(double value, absl::string_view unit);

// Returns values for the marks of an axis from `low` to `high`, some `count`.
std::vector<double> NiceTicks(double low, double high, int count);

}  // namespace tessera
#endif  // REPORT_SVG_CHART_H_
