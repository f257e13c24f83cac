#include "report/svg_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "config/reader/utf8.h"

namespace tessera {
namespace {

// Sizes of the whole drawing and of the area within, in units of the view box.
constexpr double kWidth = 640, kHeight = 270;
constexpr double kLeft = 70, kRight = 16, kTop = 12, kBottom = 40;
constexpr double kAreaWidth = kWidth - kLeft - kRight;
constexpr double kAreaHeight = kHeight - kTop - kBottom;
constexpr int kColors = 9;  // the style sheet's --c0 to --c8
constexpr int kColumns = 560;

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void Add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart), lines_(chart.lines) {
    if (chart.stacked) Stack();
    for (const double x : chart.x) x_.Add(x);
    for (const ChartLine& line : lines_) {
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
  }
  bool empty() const { return x_.empty() || y_.empty(); }

  std::string Text() {
    absl::StrAppendFormat(
        &svg_,
        "<figure class=\"chart\"><figcaption>%s%s</figcaption>\n"
        "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">\n",
        EscapeHtml(chart_.title),
        chart_.unit.empty() || chart_.unit == "bytes"
            ? ""
            : absl::StrCat(" <span class=\"unit\">", EscapeHtml(chart_.unit),
                           "</span>"),
        kWidth, kHeight, EscapeHtml(chart_.title));
    Axes();
    // The lowest of a stack is drawn last, over those above it.
    for (size_t i = lines_.size(); i-- > 0;) Draw(i, chart_.stacked);
    absl::StrAppend(&svg_, "</svg>\n");
    if (lines_.size() > 1) Legend();
    absl::StrAppend(&svg_, "</figure>\n");
    return std::move(svg_);
  }

 private:
  void Stack() {
    for (size_t i = 0; i < lines_.size(); ++i) {
      for (size_t k = 0; k < lines_[i].y.size(); ++k) {
        double& y = lines_[i].y[k];
        if (!std::isfinite(y)) y = 0;
        if (i > 0) y += lines_[i - 1].y[k];
      }
    }
  }

  // A flat line has some room around it.
  void Widen() {
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

  double X(double x) const {
    return kLeft + (x - x_.low) / (x_.high - x_.low) * kAreaWidth;
  }
  double Y(double y) const {
    if (log_) y = std::log10(y);
    return kTop + (y_.high - y) / (y_.high - y_.low) * kAreaHeight;
  }

  // Returns ticks in whole KiB, MiB, ...
  std::vector<double> BytesTicks() const {
    double unit = 1;
    while (y_.high / unit >= 1024) unit *= 1024;
    std::vector<double> ticks = NiceTicks(y_.low / unit, y_.high / unit, 5);
    for (double& tick : ticks) tick *= unit;
    return ticks;
  }

  std::vector<double> TicksOfY() const {
    if (!log_ && chart_.unit == "bytes") return BytesTicks();
    if (!log_) return NiceTicks(y_.low, y_.high, 6);
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

  void Axes() {
    for (const double tick : TicksOfY()) {
      const double y = Y(tick);
      absl::StrAppendFormat(
          &svg_,
          "<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>"
          "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
          kLeft, kLeft + kAreaWidth, y, y, kLeft - 8, y + 4,
          EscapeHtml(ShortNumber(tick, chart_.unit)));
    }
    const double bottom = kTop + kAreaHeight;
    absl::StrAppendFormat(&svg_,
                          "<line class=\"axis\" x1=\"%g\" x2=\"%g\" y1=\"%g\" "
                          "y2=\"%g\"/>\n",
                          kLeft, kLeft + kAreaWidth, bottom, bottom);
    for (const double tick : NiceTicks(x_.low, x_.high, 6)) {
      if (tick != std::floor(tick)) continue;  // steps
      absl::StrAppendFormat(
          &svg_,
          "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%g\" y2=\"%g\"/>"
          "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%s</text>\n",
          X(tick), X(tick), bottom, bottom + 4, X(tick), bottom + 18,
          ShortNumber(tick, ""));
    }
    absl::StrAppendFormat(&svg_,
                          "<text class=\"label\" x=\"%g\" y=\"%g\" "
                          "text-anchor=\"end\">step</text>\n",
                          kLeft + kAreaWidth, bottom + 34);
  }

  // Returns the points that are drawn: in each column the lowest and the
  // highest. Runs end at gaps.
  std::vector<std::vector<std::pair<double, double>>> RunsOf(
      const ChartLine& line) const {
    std::vector<std::vector<std::pair<double, double>>> runs(1);
    const bool folds = line.y.size() > size_t{2} * kColumns;
    int column = -1, in_column = 0;
    for (size_t i = 0; i < line.y.size(); ++i) {
      const double y = line.y[i];
      if (!std::isfinite(y) || (log_ && y <= 0)) {
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

  std::string TitleOf(size_t i) const {
    const ChartLine& line = chart_.lines[i];
    for (size_t k = line.y.size(); k-- > 0;) {
      if (!std::isfinite(line.y[k])) continue;
      return absl::StrCat("<title>", EscapeHtml(line.name), ": ",
                          EscapeHtml(ShortNumber(line.y[k], chart_.unit)),
                          " at step ", ShortNumber(chart_.x[k], ""),
                          "</title>");
    }
    return "";
  }

  void Point(double x, double y) {
    absl::StrAppendFormat(&svg_, "%.1f,%.1f ", X(x), Y(y));
  }

  // Draws a line, or the area between it and 0.
  void Draw(size_t i, bool area) {
    const int color = static_cast<int>(i) % kColors;
    absl::StrAppendFormat(&svg_, "<g class=\"%s\" data-series=\"%s\">%s",
                          area ? "area" : "line", EscapeHtml(lines_[i].name),
                          TitleOf(i));
    for (const auto& run : RunsOf(lines_[i])) {
      if (run.size() == 1 && !area) {
        absl::StrAppendFormat(&svg_,
                              "<circle class=\"f%d\" r=\"2.5\" cx=\"%.1f\" "
                              "cy=\"%.1f\"/>",
                              color, X(run[0].first), Y(run[0].second));
        continue;
      }
      absl::StrAppend(&svg_,
                      area ? "<polygon class=\"f" : "<polyline class=\"s",
                      color, "\" points=\"");
      if (area) Point(run.front().first, 0);
      for (const auto& [x, y] : run) Point(x, y);
      if (area) Point(run.back().first, 0);
      absl::StrAppend(&svg_, "\"/>");
    }
    absl::StrAppend(&svg_, "</g>\n");
  }

  void Legend() {
    absl::StrAppend(&svg_, "<ul class=\"legend\">");
    for (size_t i = 0; i < lines_.size(); ++i) {
      absl::StrAppendFormat(&svg_, "<li><span class=\"b%d\"></span>%s</li>",
                            i % kColors, EscapeHtml(lines_[i].name));
    }
    absl::StrAppend(&svg_, "</ul>\n");
  }

  const Chart& chart_;
  std::vector<ChartLine> lines_;  // as drawn
  Range x_, y_;
  bool log_ = false;
  std::string svg_;
};

// Trims "12.30" to "12.3" and "4.00" to "4".
std::string Trimmed(std::string digits) {
  if (digits.find('.') == std::string::npos) return digits;
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return digits;
}

std::string WithPrefix(double value, double base,
                       const std::array<const char*, 6>& prefixes) {
  size_t i = 0;
  while (std::abs(value) >= base && i + 1 < prefixes.size()) {
    value /= base;
    ++i;
  }
  const double size = std::abs(value);
  const int digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return absl::StrCat(Trimmed(absl::StrFormat("%.*f", digits, value)),
                      prefixes[i]);
}

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const int length = Utf8Length(text);
    const char c = text[0];
    const bool is_control =
        length == 1 && (c < ' ' || c == 0x7f) && c != '\n' && c != '\t';
    const auto bytes = static_cast<size_t>(std::max(length, 1));
    absl::StrAppend(&out, length == 0 || is_control ? "\xEF\xBF\xBD"
                                                    : text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return absl::StrReplaceAll(out, {{"&", "&amp;"},
                                   {"<", "&lt;"},
                                   {">", "&gt;"},
                                   {"\"", "&quot;"},
                                   {"'", "&#39;"}});
}

std::string ShortNumber(double value, absl::string_view unit) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "infinite" : "-infinite";
  if (value == 0) return unit == "bytes" ? "0 B" : "0";
  if (unit == "bytes") {
    return WithPrefix(value, 1024,
                      {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
  }
  const double size = std::abs(value);
  if (size >= 1e15 || size < 1e-3) {
    std::string text = absl::StrFormat("%.2e", value);
    const size_t e = text.find('e');
    return absl::StrCat(Trimmed(text.substr(0, e)), text.substr(e));
  }
  if (size >= 10000) {
    return WithPrefix(value, 1000, {"", "k", "M", "G", "T", "P"});
  }
  if (size >= 1)
    return Trimmed(absl::StrFormat("%.*f",
                                   size < 10    ? 3
                                   : size < 100 ? 2
                                                : 1,
                                   value));
  return Trimmed(absl::StrFormat("%.4f", value));
}

std::vector<double> NiceTicks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low) || count < 1) return ticks;
  const double raw = (high - low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) {
      step = factor * power;
      break;
    }
  }
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<int64_t>(std::floor(high / step + 1e-9));
  for (int64_t i = first; i <= last; ++i) {
    ticks.push_back(static_cast<double>(i) * step);
  }
  return ticks;
}

std::string ChartToSvg(const Chart& chart) {
  Drawing drawing(chart);
  return drawing.empty() ? "" : drawing.Text();
}

}  // namespace tessera
