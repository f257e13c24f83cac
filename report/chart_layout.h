// Decides where the lines of a chart lie, before svg_chart.h draws them.
#ifndef REPORT_CHART_LAYOUT_H_
#define REPORT_CHART_LAYOUT_H_

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/svg_chart.h"

namespace tessera {

// The drawing's size in units of the view box, which is stretched.
inline constexpr double kPlotWidth = 1000, kPlotHeight = 250;

struct ChartRange {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void Add(double value);  // unless it is not finite
  bool empty() const { return low > high; }
};

// A curve or an area.
struct PlacedLine {
  // "a", "a = b" if the lines a and b are equal; and the same with all of those
  // that are nearly equal.
  std::string first_name, name;
  const std::vector<double>* values = nullptr;  // the chart's
  // Lines that are nearly the same, which are not drawn.
  std::vector<std::pair<std::string, const std::vector<double>*>> also;
  std::vector<double> y;  // of a stack: the sum up to this one
  int color = 0;
  bool area = false, over = false, faint = false;
};

class ChartLayout {
 public:
  // `chart` outlives it.
  explicit ChartLayout(const Chart& chart);

  // Nothing is to be drawn; then no other call is allowed.
  bool empty() const { return x_.empty() || y_.empty(); }
  bool is_log() const { return log_; }
  const std::vector<PlacedLine>& lines() const { return lines_; }

  bool Shows(double y) const { return std::isfinite(y) && (!log_ || y > 0); }
  bool HoldsX(double x) const { return x >= x_.low && x <= x_.high; }
  double X(double x) const;
  double Y(double y) const;
  std::vector<double> TicksOfX() const;  // steps
  std::vector<double> TicksOfY() const;

  // Returns the points of a line that are drawn: in each of many columns the
  // lowest and the highest. Runs end at gaps.
  using Points = std::vector<std::pair<double, double>>;
  std::vector<Points> RunsOf(const PlacedLine& line) const;

  // Return the numbers of the last and of the best point.
  std::optional<size_t> LastOf(const PlacedLine& line) const;
  std::optional<size_t> BestOf(const PlacedLine& line) const;

  // Returns the first of the points of each of some bands, and the number of
  // points: points of one x are in one band.
  std::vector<size_t> Bands() const;

 private:
  void Add(const ChartLine& line);
  void Widen();
  void Merge();
  std::optional<bool> Same(const PlacedLine& a, const PlacedLine& b) const;

  const Chart& chart_;
  std::vector<PlacedLine> lines_;
  std::optional<size_t> below_;  // the number of the last area
  ChartRange x_, y_;
  bool log_ = false;
};

}  // namespace tessera
#endif  // REPORT_CHART_LAYOUT_H_
