#include "report/report_page.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json.h"
#include "base/page/page_numbers.h"
#include "base/page/page_style.h"
#include "report/html_text.h"
#include "report/run_charts.h"
#include "report/run_story.h"
#include "report/svg_chart.h"
#include "report/trace_section.h"

namespace tessera {
namespace {

constexpr size_t kMostTiles = 8;

// Formats JSON for people: a member on a line.
void AppendPretty(const JsonValue& value, int indent, std::string* out) {
  const std::string space(static_cast<size_t>(indent) + 2, ' ');
  const bool object = value.kind == JsonKind::kObject;
  const bool flat = value.kind == JsonKind::kArray &&
                    std::all_of(value.elements.begin(), value.elements.end(),
                                [](const JsonValue& element) {
                                  return element.kind != JsonKind::kObject &&
                                         element.kind != JsonKind::kArray;
                                });
  if ((!object && value.kind != JsonKind::kArray) || flat ||
      (object && value.members.empty())) {
    absl::StrAppend(out, ToJsonText(value));
    return;
  }
  const char* separator = "\n";
  absl::StrAppend(out, object ? "{" : "[");
  for (const JsonMember& member : value.members) {
    absl::StrAppend(out, separator, space, QuoteJson(member.key), ": ");
    AppendPretty(member.value, indent + 2, out);
    separator = ",\n";
  }
  for (const JsonValue& element : value.elements) {
    absl::StrAppend(out, separator, space);
    AppendPretty(element, indent + 2, out);
    separator = ",\n";
  }
  absl::StrAppend(out, "\n", space.substr(2), object ? "}" : "]");
}

class Page {
 public:
  explicit Page(const RunFiles& run) : run_(run), story_(StoryOf(run)) {}

  std::string Text() {
    html_ = PageHead(EscapeHtml(run_.folder)) + HeadlineHtml(run_, story_);
    Tiles();
    for (const std::string& note : run_.notes) {
      Add("<p class=\"note\">", EscapeHtml(note), "</p>\n");
    }
    for (const ChartGroup& group : ChartsOf(run_)) Charts(group);
    SlowestRanks();
    if (run_.traces.has_value()) html_ += TraceSection(*run_.traces);
    Plan();
    Configuration();
    Add("</main></body></html>\n");
    return std::move(html_);
  }

 private:
  template <typename... Parts>
  void Add(const Parts&... parts) {
    absl::StrAppend(&html_, parts...);
  }
  const JsonValue* Of(absl::string_view key) const {
    return run_.run.has_value() ? run_.run->Find(key) : nullptr;
  }
  void Tile(absl::string_view what, double value, absl::string_view unit) {
    if (std::isnan(value)) return;
    Tile(what, Quantity(value, unit));
  }
  void Tile(absl::string_view what, const std::string& value) {
    tiles_.push_back(absl::StrCat("<div class=\"tile\"><b>", EscapeHtml(value),
                                  "</b><span>", EscapeHtml(what),
                                  "</span></div>\n"));
  }
  using Figure = double (*)(const std::vector<double>&);
  void SeriesTile(absl::string_view what, const std::vector<std::string>& names,
                  Figure figure, absl::string_view unit) {
    const std::vector<double>* const series = FindSeries(run_, names);
    if (series != nullptr) Tile(what, figure(*series), unit);
  }
  void ShareTile(absl::string_view what, const std::string& part) {
    const auto* const parts = FindSeries(run_, {part});
    const auto* const steps = FindSeries(run_, {"step_ms"});
    if (parts == nullptr || steps == nullptr) return;
    std::vector<double> shares;
    for (size_t i = 0; i < parts->size(); ++i) {
      shares.push_back(100 * (*parts)[i] / (*steps)[i]);
    }
    Tile(what, MedianOf(shares), "%");
  }

  // As many tiles as fill rows: of all, or of a half; in rows of two, the last
  // one is as wide as it takes.
  void Tiles() {
    if (!run_.steps.empty()) {
      Tile("last step", CountText(static_cast<int64_t>(run_.steps.back())));
    }
    if (run_.diverged.count("loss") > 0) {
      Tile("last loss", "not finite");
    } else {
      SeriesTile("last loss", {"loss"}, LastOf, "");
    }
    SeriesTile("median step", {"step_ms"}, MedianOf, "ms");
    SeriesTile(HasSeries("tokens_per_second") || HasSeries("tokens_per_s")
                   ? "median tokens per second"
                   : "median samples per second",
               {"tokens_per_second", "tokens_per_s", "samples_per_second",
                "samples_per_s"},
               MedianOf, "");
    SeriesTile("highest memory peak",
               {"memory_peak_bytes", "memory.peak_bytes", "memory.peak"},
               LargestOf, "bytes");
    ShareTile("exposed communication per step (median)", "exposed_comm_ms");
    ShareTile("waiting for data per step (median)", "data_wait_ms");
    const auto* const skipped = FindSeries(run_, {"skipped_steps"});
    if (skipped != nullptr && LastOf(*skipped) > 0) {
      Tile("skipped steps", CountText(static_cast<int64_t>(LastOf(*skipped))));
    }
    if (tiles_.empty()) return;
    const size_t all = std::min(tiles_.size(), kMostTiles);
    Add("<div class=\"tiles\" style=\"--all:", all,
        ";--half:", std::max<size_t>(2, (all + 1) / 2), ";--rest:", 1 + all % 2,
        "\">\n");
    for (size_t i = 0; i < all; ++i) Add(tiles_[i]);
    Add("</div>\n");
  }
  bool HasSeries(const std::string& name) const {
    return FindSeries(run_, {name}) != nullptr;
  }

  void Charts(const ChartGroup& group) {
    std::string charts;
    for (const Chart& chart : group.charts) charts += ChartToSvg(chart);
    if (charts.empty()) return;
    Add("<section><h2>", EscapeHtml(group.title),
        "</h2>\n<div class=\"grid2\">", charts, "</div></section>\n");
  }

  // Counts in how many steps each rank's forward, or step, took longest.
  void SlowestRanks() {
    const std::vector<double>* const slowest = FindSeries(
        run_, {"forward_slowest_rank", "step_slowest_rank", "ranks.slowest"});
    if (slowest == nullptr) return;
    std::map<double, int> steps;
    int all = 0;
    for (const double rank : *slowest) {
      if (!std::isfinite(rank)) continue;
      ++steps[rank];
      ++all;
    }
    std::vector<std::pair<int, double>> most;
    for (const auto& [rank, count] : steps) most.emplace_back(-count, rank);
    std::sort(most.begin(), most.end());
    if (most.size() > 8) most.resize(8);
    if (most.empty()) return;
    Add("<section><h2>Slowest ranks</h2><div class=\"card\"><table><tr><th>"
        "rank</th><th>was the slowest in</th></tr>\n");
    for (const auto& [count, rank] : most) {
      absl::StrAppendFormat(&html_,
                            "<tr><td>%g</td><td>%d steps, %.0f %%</td></tr>\n",
                            rank, -count, 100.0 * -count / all);
    }
    Add("</table></div></section>\n");
  }

  // Returns a figure of the last process's steps, which the plan is for. Its
  // first two steps take longer, and hold more.
  double Measured(const std::vector<std::string>& names, Figure figure) const {
    const auto* const series = FindSeries(run_, names);
    if (series == nullptr) return std::numeric_limits<double>::quiet_NaN();
    const size_t begin = std::min(story_.last_process, series->size());
    const size_t first = begin + 2 < series->size() ? begin + 2 : begin;
    return figure(
        {series->begin() + static_cast<std::ptrdiff_t>(first), series->end()});
  }
  double Planned(absl::string_view key) const {
    const JsonValue* const planned = Of("planned");
    const JsonValue* const value =
        planned != nullptr && planned->kind == JsonKind::kObject
            ? planned->Find(key)
            : nullptr;
    return value != nullptr && value->kind == JsonKind::kNumber
               ? value->number
               : std::numeric_limits<double>::quiet_NaN();
  }
  void PlanRow(absl::string_view what, double planned, double measured,
               absl::string_view unit) {
    if (std::isnan(planned) && std::isnan(measured)) return;
    const auto cell = [&](double value) {
      return std::isnan(value) ? "\xE2\x80\x93"
                               : EscapeHtml(Quantity(value, unit));
    };
    const double ratio = measured / planned;
    Add("<tr><td class=\"name\">", what, "</td><td>", cell(planned),
        "</td><td>", cell(measured), "</td><td>",
        std::isfinite(ratio) ? ShortNumber(ratio, "") : "\xE2\x80\x93",
        "</td></tr>\n");
  }

  void Plan() {
    const JsonValue* const plan = Of("plan");
    if (plan == nullptr || plan->kind == JsonKind::kNull) return;
    Add("<section id=\"plan\"><h2>Planned and measured</h2><div class=\"card\">"
        "<div class=\"scroll\"><table><tr><th class=\"name\">of the last "
        "process</th><th>planned</th><th>measured</th><th>measured / "
        "planned</th></tr>\n");
    PlanRow("memory peak, largest of all ranks", Planned("peak_bytes"),
            Measured({"memory_peak_bytes", "memory.peak_bytes", "memory.peak"},
                     LargestOf),
            "bytes");
    PlanRow("a step (median)", Planned("step_ms"),
            Measured({"step_ms"}, MedianOf), "ms");
    Add("</table></div>\n<details><summary>the plan for all stages</summary>"
        "<pre>");
    std::string text = plan->text;
    if (plan->kind != JsonKind::kString) {
      text.clear();
      AppendPretty(*plan, 0, &text);
    }
    Add(EscapeHtml(text), "</pre></details></div></section>\n");
  }

  void Configuration() {
    const JsonValue* const config = Of("config");
    if (config == nullptr) return;
    std::string text;
    AppendPretty(*config, 0, &text);
    Add("<section id=\"config\"><h2>Configuration</h2><div class=\"card\">"
        "<details><summary>as resolved</summary><pre>",
        EscapeHtml(text), "</pre></details></div></section>\n");
  }

  const RunFiles& run_;
  const RunStory story_;
  std::vector<std::string> tiles_;
  std::string html_;
};

}  // namespace

std::string ReportPage(const RunFiles& run) { return Page(run).Text(); }

}  // namespace tessera
