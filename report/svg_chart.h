// Draws charts of a page as inline SVG, without script or library. Colours and
// text follow the page's style sheet (base/page/page_style.h), so that a page
// is light or dark.
//
//   caption   what it shows
//   plot      curves of which no two hide each other: those that cannot be told
//             apart are one; a dot at the last point, a ring at the best one;
//             dashed lines where the run was resumed
//   legend    what is drawn, with the last and the best value
//
// Over each step lies an element that shows its values when a reader points at
// it.
#ifndef REPORT_SVG_CHART_H_
#define REPORT_SVG_CHART_H_

#include <string>
#include <vector>

namespace tessera {

struct ChartLine {
  std::string name;
  std::vector<double> y;  // as long as the chart's x; not finite: a gap
  int color = -1;         // of the palette; -1: by the line's number
  bool over = false;      // drawn over a stack, not in it
  bool faint = false;     // another line says the same more clearly
};

// A place between steps.
struct ChartMark {
  double x = 0;
  std::string text;   // "3 ranks"
  std::string title;  // "resumed at step 100 on 3 ranks"
};

struct Chart {
  std::string title;
  std::string unit;  // of y: "ms", "%", "bytes"; "" without one
  std::vector<double> x;
  std::vector<ChartLine> lines;
  std::vector<ChartMark> marks;
  bool stacked = false;    // areas on top of each other, of y >= 0
  bool from_zero = false;  // the axis begins at 0
  bool log_scale = false;  // used if all y are above 0 and differ much
  bool lowest = false;     // the best value is the lowest one, and is marked
  bool wide = false;       // as wide as the page, and higher
  bool row = false;        // as wide as the page
};

// Returns <figure class="chart">...</figure>, or "" if no line has a finite
// point.
std::string ChartToSvg(const Chart& chart);

}  // namespace tessera
#endif  // REPORT_SVG_CHART_H_
