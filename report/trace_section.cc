#include "report/trace_section.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "report/svg_chart.h"

namespace tessera {
namespace {

constexpr double kBarLeft = 90, kBarWidth = 760, kRowHeight = 40;
constexpr size_t kMostBars = 12, kMostWaits = 10;

// Draws a step of all ranks: phases above, their exposed parts below.
void AddBar(const StepSummary& step, double y, double longest,
            std::string* svg) {
  const double scale = kBarWidth / longest;
  absl::StrAppendFormat(svg,
                        "<text x=\"%g\" y=\"%g\" text-anchor=\"end\">step "
                        "%d</text>\n",
                        kBarLeft - 8, y + 15, step.step);
  double x = kBarLeft;
  const auto part = [&](double ms, int color, const char* name, double top,
                        double height) {
    if (ms <= 0) return;
    absl::StrAppendFormat(
        svg,
        "<rect class=\"f%d\" x=\"%.1f\" y=\"%g\" width=\"%.2f\" "
        "height=\"%g\"><title>%s, step %d: %.2f ms</title></rect>\n",
        color, x, top, std::max(0.5, ms * scale), height, name, step.step, ms);
    x += ms * scale;
  };
  part(step.forward, 0, "forward", y, 18);
  part(step.backward, 4, "backward", y, 18);
  part(step.optimizer, 2, "optimizer step", y, 18);
  absl::StrAppendFormat(svg, "<text x=\"%.1f\" y=\"%g\">%s ms</text>\n", x + 6,
                        y + 14, ShortNumber(step.total, "ms"));
  x = kBarLeft;
  part(step.exposed, 1, "exposed communication", y + 21, 7);
  part(step.hidden, 3, "hidden communication", y + 21, 7);
}

// Says what the page does not show.
void AddLeftOut(size_t shown, size_t all, const char* what, std::string* html) {
  if (all <= shown) return;
  absl::StrAppendFormat(html,
                        "<p class=\"note\">%d more %s: tessera trace "
                        "summary --top=%d has them.</p>\n",
                        all - shown, what, all);
}

void AddBars(const TraceSummary& summary, std::string* html) {
  const size_t bars = std::min(kMostBars, summary.steps.size());
  double longest = 1e-9;
  for (size_t i = 0; i < bars; ++i) {
    const StepSummary& s = summary.steps[i];
    longest = std::max(
        {longest, s.forward + s.backward + s.optimizer, s.exposed + s.hidden});
  }
  absl::StrAppendFormat(html,
                        "<figure class=\"chart wide\"><figcaption>steps, means "
                        "over ranks</figcaption>\n<svg viewBox=\"0 0 960 %g\" "
                        "role=\"img\" aria-label=\"steps\">\n",
                        static_cast<double>(bars) * kRowHeight + 4);
  for (size_t i = 0; i < bars; ++i) {
    AddBar(summary.steps[i], static_cast<double>(i) * kRowHeight + 4, longest,
           html);
  }
  absl::StrAppend(
      html,
      "</svg>\n<ul class=\"legend\"><li><span class=\"b0\"></span>forward</li>"
      "<li><span class=\"b4\"></span>backward</li><li><span "
      "class=\"b2\"></span>optimizer step</li><li><span "
      "class=\"b1\"></span>exposed communication</li><li><span "
      "class=\"b3\"></span>hidden communication</li></ul></figure>\n");
  AddLeftOut(bars, summary.steps.size(), "steps", html);
}

void AddWaitTable(const TraceSummary& summary, std::string* html) {
  if (summary.waits.empty()) {
    absl::StrAppend(html, "<p>No wait for communication was exposed.</p>\n");
    return;
  }
  absl::StrAppend(html,
                  "<h3>What was waited for, all steps and ranks</h3>\n"
                  "<div class=\"scroll\"><table><tr><th class=\"name\">wait"
                  "</th><th>total ms</th><th>waits</th><th>longest ms</th>");
  for (int i = 0; i < kNumWaitCauses; ++i) {
    absl::StrAppend(html, "<th>", WaitCauseName(static_cast<WaitCause>(i)),
                    "</th>");
  }
  absl::StrAppend(html, "</tr>\n");
  for (size_t i = 0; i < std::min(kMostWaits, summary.waits.size()); ++i) {
    const WaitSummary& wait = summary.waits[i];
    absl::StrAppendFormat(
        html,
        "<tr><td class=\"name\">%s</td><td>%.2f</td><td>%d</td><td>%.2f</td>",
        EscapeHtml(wait.unit.empty()
                       ? absl::StrCat(wait.reason, ", ", wait.what)
                       : absl::StrCat(wait.reason, " of unit ", wait.unit)),
        wait.total, wait.count, wait.longest);
    for (const double ms : wait.by_cause) {
      if (ms < 0.005) {
        absl::StrAppend(html, "<td></td>");
      } else {
        absl::StrAppendFormat(html, "<td>%.2f</td>", ms);
      }
    }
    absl::StrAppend(html, "</tr>\n");
  }
  absl::StrAppend(html, "</table></div>\n");
  AddLeftOut(kMostWaits, summary.waits.size(), "waits", html);
}

void AddRankTable(const TraceSummary& summary, std::string* html) {
  if (summary.rank_summaries.size() < 2) return;
  absl::StrAppend(html,
                  "<h3>Ranks, means of a step in ms</h3>\n<div "
                  "class=\"scroll\"><table><tr><th>rank</th><th>step</th>"
                  "<th>own work</th><th>exposed</th><th>others waited for "
                  "it</th></tr>\n");
  for (const RankSummary& rank : summary.rank_summaries) {
    absl::StrAppendFormat(html,
                          "<tr><td>%d</td><td>%.2f</td><td>%.2f</td><td>%.2f"
                          "</td><td>%.2f</td></tr>\n",
                          rank.rank, rank.step, rank.work, rank.exposed,
                          rank.others_waited);
  }
  absl::StrAppend(html, "</table></div>\n");
}

}  // namespace

std::string TraceSection(const TraceSummary& summary) {
  std::string html = "<section id=\"trace\"><h2>Trace</h2>\n";
  AddBars(summary, &html);
  AddWaitTable(summary, &html);
  AddRankTable(summary, &html);
  for (const std::string& note : summary.notes) {
    absl::StrAppend(&html, "<p class=\"note\">", EscapeHtml(note), "</p>\n");
  }
  absl::StrAppend(&html, "</section>\n");
  return html;
}

}  // namespace tessera
