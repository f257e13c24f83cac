#include "report/chart_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/page/page_numbers.h"
#include "base/page/page_style.h"

namespace tessera {
namespace {

constexpr int kColumns = 560;  // of a curve
constexpr int kBands = 240;

// Returns ticks in whole KiB, MiB, ...
std::vector<double> BytesTicks(const ChartRange& range) {
  double unit = 1;
  while (range.high / unit >= 1024) unit *= 1024;
  std::vector<double> ticks = NiceTicks(range.low / unit, range.high / unit, 5);
  for (double& tick : ticks) tick *= unit;
  return ticks;
}

}  // namespace

void ChartRange::Add(double value) {
  if (!std::isfinite(value)) return;
  low = std::min(low, value);
  high = std::max(high, value);
}

ChartLayout::ChartLayout(const Chart& chart) : chart_(chart) {
  for (const ChartLine& line : chart.lines) Add(line);
  for (const double x : chart.x) x_.Add(x);
  for (const PlacedLine& line : lines_) {
    for (const double y : line.y) y_.Add(y);
  }
  if (empty()) return;
  log_ = chart.log_scale && y_.low > 0 && y_.high / y_.low > 20;
  if (log_) {
    y_ = {std::log10(y_.low), std::log10(y_.high)};
  } else if (chart.from_zero || chart.stacked) {
    y_.low = std::min(0.0, y_.low);
  }
  Widen();
  Merge();
}

// Lines without a finite point are left out.
void ChartLayout::Add(const ChartLine& line) {
  if (std::none_of(line.y.begin(), line.y.end(),
                   [](double y) { return std::isfinite(y); })) {
    return;
  }
  PlacedLine drawn;
  drawn.name = drawn.first_name = line.name;
  drawn.values = &line.y;
  drawn.y = line.y;
  drawn.color = line.color >= 0 ? line.color
                                : static_cast<int>(lines_.size()) % kPageColors;
  drawn.area = chart_.stacked && !line.over;
  drawn.over = line.over;
  drawn.faint = line.faint;
  if (drawn.area) {
    for (size_t k = 0; k < drawn.y.size(); ++k) {
      if (!std::isfinite(drawn.y[k])) drawn.y[k] = 0;
      if (below_.has_value()) drawn.y[k] += lines_[*below_].y[k];
    }
    below_ = lines_.size();
  }
  lines_.push_back(std::move(drawn));
}

// A flat line has some room around it.
void ChartLayout::Widen() {
  if (x_.high == x_.low) {
    x_.low -= 0.5;
    x_.high += 0.5;
  }
  const double room = y_.high == y_.low
                          ? std::max(std::abs(y_.high) * 0.05, 1e-12)
                          : (y_.high - y_.low) * 0.05;
  y_.high += room;
  if (y_.low != 0 || log_) y_.low -= room;
}

// The first of curves that nobody could tell apart is drawn for all.
void ChartLayout::Merge() {
  for (size_t i = 0; i < lines_.size(); ++i) {
    for (size_t k = i + 1; k < lines_.size();) {
      const std::optional<bool> same = Same(lines_[i], lines_[k]);
      if (!same.has_value()) {
        ++k;
        continue;
      }
      if (*same) {
        absl::StrAppend(&lines_[i].first_name, " = ", lines_[k].name);
      } else {
        lines_[i].also.emplace_back(lines_[k].name, lines_[k].values);
      }
      lines_.erase(lines_.begin() + static_cast<std::ptrdiff_t>(k));
    }
    lines_[i].name = lines_[i].first_name;
    for (const auto& [name, values] : lines_[i].also) {
      absl::StrAppend(&lines_[i].name, " \xE2\x89\x88 ", name);
    }
  }
}

// Returns whether all values are equal; nothing if a reader sees two curves.
std::optional<bool> ChartLayout::Same(const PlacedLine& a,
                                      const PlacedLine& b) const {
  if (a.area || a.over || b.area || b.over || a.faint || b.faint) {
    return std::nullopt;
  }
  bool equal = true;
  for (size_t i = 0; i < a.y.size(); ++i) {
    if (Shows(a.y[i]) != Shows(b.y[i])) return std::nullopt;
    if (!Shows(a.y[i])) continue;
    if (std::abs(Y(a.y[i]) - Y(b.y[i])) > 1) return std::nullopt;
    equal &= a.y[i] == b.y[i];
  }
  return equal;
}

double ChartLayout::X(double x) const {
  return (x - x_.low) / (x_.high - x_.low) * kPlotWidth;
}

double ChartLayout::Y(double y) const {
  if (log_) y = std::log10(y);
  return (y_.high - y) / (y_.high - y_.low) * kPlotHeight;
}

// Steps are whole numbers.
std::vector<double> ChartLayout::TicksOfX() const {
  std::vector<double> ticks = NiceTicks(x_.low, x_.high, 6);
  ticks.erase(std::remove_if(ticks.begin(), ticks.end(),
                             [](double x) { return x != std::floor(x); }),
              ticks.end());
  return ticks;
}

std::vector<double> ChartLayout::TicksOfY() const {
  if (!log_ && chart_.unit == "bytes") return BytesTicks(y_);
  if (!log_) return NiceTicks(y_.low, y_.high, 5);
  std::vector<double> ticks;
  const auto first = static_cast<int>(std::floor(y_.low));
  const auto last = static_cast<int>(std::ceil(y_.high));
  const bool few = last - first <= 3;
  for (int power = first; power <= last; ++power) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (!few && digit != 1) continue;
      const double tick = digit * std::pow(10.0, power);
      const double at = std::log10(tick);
      if (at >= y_.low && at <= y_.high) ticks.push_back(tick);
    }
  }
  return ticks;
}

std::vector<ChartLayout::Points> ChartLayout::RunsOf(
    const PlacedLine& line) const {
  std::vector<Points> runs(1);
  const bool folds = line.y.size() > size_t{2} * kColumns;
  int column = -1, in_column = 0;
  for (size_t i = 0; i < line.y.size(); ++i) {
    const double y = line.y[i];
    if (!Shows(y)) {
      if (!runs.back().empty()) runs.emplace_back();
      column = -1;
      continue;
    }
    auto& run = runs.back();
    const auto here = static_cast<int>((chart_.x[i] - x_.low) /
                                       (x_.high - x_.low) * kColumns);
    in_column = here == column ? in_column + 1 : 1;
    column = here;
    if (!folds || in_column <= 2) {
      run.emplace_back(chart_.x[i], y);
      continue;
    }
    auto& low = run[run.size() - 2].second;
    auto& high = run.back().second;
    if (low > high) std::swap(low, high);
    low = std::min(low, y);
    high = std::max(high, y);
  }
  if (runs.back().empty()) runs.pop_back();
  return runs;
}

std::optional<size_t> ChartLayout::LastOf(const PlacedLine& line) const {
  for (size_t k = line.values->size(); k-- > 0;) {
    if (Shows((*line.values)[k])) return k;
  }
  return std::nullopt;
}

std::optional<size_t> ChartLayout::BestOf(const PlacedLine& line) const {
  std::optional<size_t> best;
  if (!chart_.lowest || line.area || line.over) return best;
  for (size_t k = 0; k < line.values->size(); ++k) {
    const double y = (*line.values)[k];
    if (!Shows(y)) continue;
    if (!best.has_value() || y < (*line.values)[*best]) best = k;
  }
  return best;
}

std::vector<size_t> ChartLayout::Bands() const {
  std::vector<size_t> firsts;
  for (size_t i = 0; i < chart_.x.size(); ++i) {
    if (i == 0 || chart_.x[i] != chart_.x[i - 1]) firsts.push_back(i);
  }
  std::vector<size_t> bands;
  const size_t each = (firsts.size() + kBands - 1) / kBands;
  for (size_t i = 0; i < firsts.size(); i += each) bands.push_back(firsts[i]);
  bands.push_back(chart_.x.size());
  return bands;
}

}  // namespace tessera
