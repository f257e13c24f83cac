#include "report/report_page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/json.h"
#include "report/run_charts.h"
#include "report/svg_chart.h"
#include "report/trace_section.h"

namespace tessera {
namespace {

// Series have the colours of Okabe and Ito, which the colour-blind can tell
// apart, too, a little lighter on a dark background.
constexpr char kStyle[] = R"(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1d2430;--soft:#5b6472;
--grid:#e3e6eb;--axis:#9aa3b0;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#7fb8dc;
--c4:#cc79a7;--c5:#e69f00;--c6:#8a8f98;--c7:#6a51a3;--c8:#b8a900}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--card:#1d2128;--ink:#e6e9ee;
--soft:#a0a8b5;--grid:#2e343e;--axis:#6b7482;--c0:#4aa8e0;--c1:#ff8a3d;--c2:#2fc79a;
--c3:#2f6f99;--c4:#e39cc4;--c5:#f5bd3d;--c6:#a4aab4;--c7:#a48fd8;--c8:#e0d34a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:32px 0 12px}
h3{font-size:15px;margin:20px 0 8px}
.soft,.unit{color:var(--soft);font-weight:400}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:18px 0}
.tile,.chart,.card{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:12px 14px;margin:0}
.tile b{display:block;font-size:21px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr));gap:16px}
.chart figcaption{font-weight:600;margin-bottom:6px;overflow-wrap:anywhere}
.chart svg{display:block;width:100%;height:auto;font-size:13px}
.wide svg{font-size:11px}
svg text{fill:var(--soft)}svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--axis)}
svg polyline{fill:none;stroke-width:1.4;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;padding:0;font-size:13px}
.legend span{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
td,th{padding:4px 12px;text-align:right;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:600}td.name,th.name{text-align:left;overflow-wrap:anywhere}
.scroll{overflow-x:auto}pre{overflow:auto;margin:8px 0 0;font:13px/1.45 ui-monospace,monospace}
.note{color:var(--soft);border-left:3px solid var(--c5);padding-left:10px}
summary{cursor:pointer;font-weight:600}
)";

std::string Colors() {
  std::string css;
  for (int i = 0; i < 9; ++i) {
    absl::StrAppend(&css, ".s", i, "{stroke:var(--c", i, ")}.f", i,
                    "{fill:var(--c", i, ")}.b", i, "{background:var(--c", i,
                    ")}");
  }
  return css;
}

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
  explicit Page(const RunFiles& run) : run_(run) {}

  std::string Text() {
    Head();
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
  static std::string TextOf(const JsonValue& value) {
    return value.kind == JsonKind::kString ? value.text : ToJsonText(value);
  }

  void Head() {
    const std::string name = EscapeHtml(run_.folder);
    Add("<!DOCTYPE html>\n<html lang=\"en\" "
        "xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta "
        "charset=\"utf-8\"/><meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\"/><title>",
        name, "</title>\n<style>", kStyle, Colors(),
        "</style></head><body><main>\n<h1>", name, "</h1>\n<p class=\"soft\">");
    std::vector<std::string> words;
    for (const char* const key : {"version", "world_size", "stage", "backend",
                                  "device", "parameters"}) {
      const JsonValue* const value = Of(key);
      if (value == nullptr) continue;
      std::string what = key;
      std::replace(what.begin(), what.end(), '_', ' ');
      const std::string text =
          value->kind == JsonKind::kNumber && value->number >= 10000
              ? ShortNumber(value->number, "")
              : TextOf(*value);
      words.push_back(absl::StrCat(what, " ", text));
    }
    const JsonValue* const start = Of("start_time");
    if (start != nullptr && start->kind == JsonKind::kNumber) {
      words.push_back(absl::FormatTime(
          "started %Y-%m-%d %H:%M:%S UTC",
          absl::FromUnixSeconds(static_cast<int64_t>(start->number)),
          absl::UTCTimeZone()));
    }
    for (size_t i = 0; i < words.size(); ++i) {
      Add(i == 0 ? "" : " · ", EscapeHtml(words[i]));
    }
    Add("</p>\n");
  }

  void Tile(absl::string_view what, double value, absl::string_view unit) {
    if (std::isnan(value)) return;
    Add("<div class=\"tile\"><b>", EscapeHtml(ShortNumber(value, unit)),
        unit.empty() || unit == "bytes" ? "" : absl::StrCat(" ", unit),
        "</b><span>", EscapeHtml(what), "</span></div>\n");
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

  void Tiles() {
    Add("<div class=\"tiles\">\n");
    if (!run_.steps.empty()) Tile("last step", run_.steps.back(), "");
    SeriesTile("last loss", {"loss"}, LastOf, "");
    SeriesTile("median step", {"step_ms"}, MedianOf, "ms");
    SeriesTile("median tokens a second", {"tokens_per_second", "tokens_per_s"},
               MedianOf, "");
    SeriesTile("median samples a second",
               {"samples_per_second", "samples_per_s"}, MedianOf, "");
    SeriesTile("highest peak of memory",
               {"memory_peak_bytes", "memory.peak_bytes", "memory.peak"},
               LargestOf, "bytes");
    ShareTile("of a step exposed communication (median)", "exposed_comm_ms");
    ShareTile("of a step waiting for data (median)", "data_wait_ms");
    SeriesTile("skipped steps", {"skipped_steps"}, LastOf, "");
    Add("</div>\n");
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

  void Row(absl::string_view what, const std::string& value) {
    Add("<tr><td class=\"name\">", EscapeHtml(what), "</td><td>",
        EscapeHtml(value), "</td></tr>\n");
  }

  void Plan() {
    const JsonValue* const plan = Of("plan");
    if (plan == nullptr || plan->kind == JsonKind::kNull) return;
    Add("<section id=\"plan\"><h2>Planned and measured</h2><div class=\"card\">"
        "<h3>measured</h3><table>\n");
    const auto measured = [&](absl::string_view what,
                              const std::vector<std::string>& names,
                              Figure figure, absl::string_view unit) {
      const auto* const series = FindSeries(run_, names);
      if (series == nullptr || std::isnan(figure(*series))) return;
      const bool bytes = unit == "bytes";
      Row(what, absl::StrCat(ShortNumber(figure(*series), unit),
                             bytes ? "" : absl::StrCat(" ", unit)));
    };
    measured("median step", {"step_ms"}, MedianOf, "ms");
    measured("highest peak of memory, of any rank",
             {"memory_peak_bytes", "memory.peak_bytes", "memory.peak"},
             LargestOf, "bytes");
    Add("</table>\n<h3>planned</h3>\n");
    if (plan->kind == JsonKind::kString) {
      Add("<pre>", EscapeHtml(plan->text), "</pre>");
    } else {
      std::string text;
      AppendPretty(*plan, 0, &text);
      Add("<pre>", EscapeHtml(text), "</pre>");
    }
    Add("</div></section>\n");
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
  std::string html_;
};

}  // namespace

std::string ReportPage(const RunFiles& run) { return Page(run).Text(); }

}  // namespace tessera
