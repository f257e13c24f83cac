#include "report/svg_chart.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/page/page_numbers.h"
#include "report/chart_layout.h"
#include "report/html_text.h"

namespace tessera {
namespace {

constexpr size_t kMostDots = 240;
constexpr double kMarkRoom = 0.38;  // of its text, on a telephone
constexpr int kHoverDigits = 5;

std::string ColorClass(const char* what, const PlacedLine& line) {
  return line.over ? "over" : absl::StrCat(what, line.color);
}

class Drawing {
 public:
  Drawing(const Chart& chart, const ChartLayout& layout)
      : chart_(chart), layout_(layout), lines_(layout.lines()) {}

  std::string Text() {
    absl::StrAppend(
        &svg_, "<figure class=\"chart",
        chart_.wide  ? " wide"
        : chart_.row ? " row"
                     : "",
        "\"><figcaption>", EscapeHtml(chart_.title), "</figcaption>\n",
        "<div class=\"plot\"><svg viewBox=\"0 0 ", kPlotWidth, " ", kPlotHeight,
        "\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
        EscapeHtml(chart_.title), "\">\n");
    Axes();
    // The lowest of a stack is drawn last, over those above it; then what lies
    // over the stack.
    for (size_t i = lines_.size(); i-- > 0;) {
      if (!lines_[i].over) Draw(lines_[i]);
    }
    for (const PlacedLine& line : lines_) {
      if (line.over) Draw(line);
    }
    for (const PlacedLine& line : lines_) Ends(line);
    Marks();
    Bands();
    absl::StrAppend(&svg_, "</svg>\n", words_, "</div>\n");
    Legend();
    absl::StrAppend(&svg_, "</figure>\n");
    return std::move(svg_);
  }

 private:
  void Word(const char* place, const char* side, double percent,
            absl::string_view text) {
    absl::StrAppendFormat(&words_,
                          "<span class=\"%s\" style=\"%s:%.2f%%\">%s</span>\n",
                          place, side, percent, EscapeHtml(text));
  }

  // A unit says what an axis shows; without one, the title does.
  std::string LabelOfY() const {
    const std::string what = !chart_.unit.empty()        ? chart_.unit
                             : chart_.title.size() <= 24 ? chart_.title
                                                         : "value";
    return layout_.is_log() ? absl::StrCat(what, ", log scale") : what;
  }

  void Axes() {
    const std::vector<double> ticks = layout_.TicksOfY();
    const std::vector<std::string> texts = TickTexts(ticks, chart_.unit);
    for (size_t i = 0; i < ticks.size(); ++i) {
      const double y = layout_.Y(ticks[i]);
      absl::StrAppendFormat(&svg_, "<path class=\"grid\" d=\"M0 %.1fH%g\"/>\n",
                            y, kPlotWidth);
      Word("y", "top", 100 * y / kPlotHeight, texts[i]);
    }
    absl::StrAppendFormat(&svg_, "<path class=\"axis\" d=\"M0 %gH%g\"/>\n",
                          kPlotHeight, kPlotWidth);
    for (const double tick : layout_.TicksOfX()) {
      absl::StrAppendFormat(&svg_, "<path class=\"axis\" d=\"M%.1f %gv-4\"/>\n",
                            layout_.X(tick), kPlotHeight);
      Word("x", "left", 100 * layout_.X(tick) / kPlotWidth, Step(tick));
    }
    absl::StrAppend(&words_, "<span class=\"yl\">", EscapeHtml(LabelOfY()),
                    "</span><span class=\"xl\">step</span>\n");
  }

  static std::string Step(double step) {
    return std::abs(step) < 1e15 ? CountText(static_cast<int64_t>(step))
                                 : ShortNumber(step, "");
  }

  // Joins points that were taken now and then, as those of evaluations are.
  static bool JoinSparse(std::vector<ChartLayout::Points>* runs) {
    size_t points = 0;
    for (const ChartLayout::Points& run : *runs) points += run.size();
    if (runs->size() < 2 || points > 2 * runs->size() - 1) return false;
    ChartLayout::Points all;
    for (const ChartLayout::Points& run : *runs) {
      all.insert(all.end(), run.begin(), run.end());
    }
    *runs = {std::move(all)};
    return true;
  }

  void Point(double x, double y) {
    absl::StrAppendFormat(&svg_, "%.1f,%.1f ", layout_.X(x), layout_.Y(y));
  }
  // A dot is a line without length, which has round ends at any scale.
  std::string Dot(double x, double y) const {
    return absl::StrFormat("M%.1f %.1fh.01", layout_.X(x), layout_.Y(y));
  }

  // Draws a line, or the area between it and 0.
  void Draw(const PlacedLine& line) {
    absl::StrAppend(&svg_, "<g class=\"", line.area ? "area" : "line",
                    line.faint ? "\" opacity=\".4" : "", "\" data-series=\"",
                    EscapeHtml(line.name), "\">");
    std::vector<ChartLayout::Points> runs = layout_.RunsOf(line);
    const bool joined = !line.area && JoinSparse(&runs);
    std::string dots;
    size_t count = 0;
    for (const ChartLayout::Points& run : runs) {
      if (!line.area && (joined || run.size() == 1)) {
        for (const auto& [x, y] : run) {
          if (++count <= kMostDots) dots += Dot(x, y);
        }
      }
      if (run.size() == 1 && !line.area) continue;
      absl::StrAppend(&svg_,
                      line.area ? "<polygon class=\"" : "<polyline class=\"",
                      ColorClass(line.area ? "f" : "s", line), "\" points=\"");
      if (line.area) Point(run.front().first, 0);
      for (const auto& [x, y] : run) Point(x, y);
      if (line.area) Point(run.back().first, 0);
      absl::StrAppend(&svg_, "\"/>");
    }
    if (!dots.empty()) {
      absl::StrAppend(&svg_, "<path class=\"p ", ColorClass("s", line),
                      "\" d=\"", dots, "\"/>");
    }
    absl::StrAppend(&svg_, "</g>\n");
  }

  // Marks a curve's last and best points.
  void Ends(const PlacedLine& line) {
    if (line.area || line.over || line.faint) return;
    const auto dot = [&](size_t k, const std::string& look) {
      absl::StrAppend(&svg_, "<path class=\"p ", look, "\" d=\"",
                      Dot(chart_.x[k], line.y[k]), "\"/>");
    };
    const std::string color = absl::StrCat("s", line.color);
    if (const auto last = layout_.LastOf(line)) dot(*last, color);
    if (const auto best = layout_.BestOf(line)) {
      dot(*best, absl::StrCat(color, " big best"));
      dot(*best, "hole");
    }
    absl::StrAppend(&svg_, "\n");
  }

  void Marks() {
    double free_from = -1;
    for (const ChartMark& mark : chart_.marks) {
      if (!layout_.HoldsX(mark.x)) continue;
      const double x = layout_.X(mark.x);
      absl::StrAppendFormat(&svg_,
                            "<path class=\"cut\" d=\"M%.1f 0V%g\"><title>%s"
                            "</title></path>\n",
                            x, kPlotHeight, EscapeHtml(mark.title));
      if (mark.text.empty() || x < free_from) continue;
      free_from = x + kPlotWidth * kMarkRoom;
      Word("mark", "left", 100 * x / kPlotWidth, mark.text);
    }
  }

  std::string BandTitle(size_t begin, size_t end) const {
    const double first = chart_.x[begin], last = chart_.x[end - 1];
    std::string title =
        absl::StrCat("step", first == last ? " " : "s ", Step(first));
    if (first != last) absl::StrAppend(&title, " to ", Step(last));
    for (const ChartMark& mark : chart_.marks) {
      const bool here =
          begin > 0 && mark.x >= chart_.x[begin - 1] && mark.x < last;
      if (here) absl::StrAppend(&title, ", ", mark.title);
    }
    for (const PlacedLine& line : lines_) {
      AddValues(line.first_name, *line.values, begin, end, &title);
      for (const auto& [name, values] : line.also) {
        AddValues(name, *values, begin, end, &title);
      }
    }
    return EscapeHtml(title);
  }

  // Adds the value, or the lowest and the highest of several.
  void AddValues(const std::string& name, const std::vector<double>& values,
                 size_t begin, size_t end, std::string* title) const {
    ChartRange range;
    for (size_t i = begin; i < end; ++i) range.Add(values[i]);
    if (range.empty()) return;
    absl::StrAppend(title, "\n", name, ": ",
                    Quantity(range.low, chart_.unit, kHoverDigits));
    if (range.high == range.low) return;
    absl::StrAppend(title, " to ",
                    Quantity(range.high, chart_.unit, kHoverDigits));
  }

  void Bands() {
    const std::vector<size_t> bands = layout_.Bands();
    double left = 0;
    for (size_t b = 0; b + 1 < bands.size(); ++b) {
      const size_t begin = bands[b], end = bands[b + 1];
      const double right =
          end == chart_.x.size()
              ? kPlotWidth
              : (layout_.X(chart_.x[end - 1]) + layout_.X(chart_.x[end])) / 2;
      absl::StrAppendFormat(&svg_,
                            "<g class=\"h\"><title>%s</title><rect x=\"%.1f\" "
                            "width=\"%.1f\" height=\"%g\"/>",
                            BandTitle(begin, end), left, right - left,
                            kPlotHeight);
      if (end == begin + 1 && !chart_.stacked) BandDots(begin);
      absl::StrAppend(&svg_, "</g>\n");
      left = right;
    }
  }

  void BandDots(size_t i) {
    for (const PlacedLine& line : lines_) {
      if (!layout_.Shows(line.y[i]) || line.faint) continue;
      absl::StrAppend(&svg_, "<path class=\"p s", line.color, "\" d=\"",
                      Dot(chart_.x[i], line.y[i]), "\"/>");
    }
  }

  void Legend() {
    absl::StrAppend(&svg_, "<ul class=\"legend\">");
    for (const PlacedLine& line : lines_) {
      absl::StrAppend(&svg_, "<li><span class=\"key ", ColorClass("b", line),
                      line.faint ? "\" style=\"opacity:.4" : "", "\"></span>",
                      EscapeHtml(line.name));
      const auto last = layout_.LastOf(line);
      const auto best = layout_.BestOf(line);
      const auto value = [&](size_t k) {
        return EscapeHtml(Quantity((*line.values)[k], chart_.unit));
      };
      if (last.has_value()) {
        absl::StrAppend(&svg_, ": <b>", value(*last), "</b> last");
      }
      if (best.has_value() && !line.faint) {
        absl::StrAppend(&svg_, ", <b>", value(*best), "</b> lowest (step ",
                        Step(chart_.x[*best]), ")");
      }
      absl::StrAppend(&svg_, "</li>");
    }
    absl::StrAppend(&svg_, "</ul>\n");
  }

  const Chart& chart_;
  const ChartLayout& layout_;
  const std::vector<PlacedLine>& lines_;
  std::string svg_, words_;
};

}  // namespace

std::string ChartToSvg(const Chart& chart) {
  const ChartLayout layout(chart);
  return layout.empty() ? "" : Drawing(chart, layout).Text();
}

}  // namespace tessera
