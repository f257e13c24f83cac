#include "report/trace_section.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/page/page_numbers.h"
#include "report/html_text.h"

namespace tessera {
namespace {

constexpr size_t kMostBars = 12, kMostWaits = 10;

// Draws a step of all ranks: phases above, their communication below.
void AddBar(const StepSummary& step, double longest, std::string* html) {
  const double scale = 1000 / longest;
  absl::StrAppendFormat(
      html,
      "<div class=\"bar\"><span>step %d</span><div class=\"bars\"><svg "
      "viewBox=\"0 0 1000 30\" preserveAspectRatio=\"none\" role=\"img\" "
      "aria-label=\"step %d\">",
      step.step, step.step);
  double x = 0;
  const auto part = [&](double ms, int color, const char* name, double top,
                        double height) {
    if (ms <= 0) return;
    absl::StrAppendFormat(
        html,
        "<rect class=\"f%d\" x=\"%.1f\" y=\"%g\" width=\"%.2f\" "
        "height=\"%g\"><title>%s, step %d: %s ms</title></rect>\n",
        color, x, top, std::max(0.5, ms * scale), height, name, step.step,
        ShortNumber(ms, "ms"));
    x += ms * scale;
  };
  part(step.forward, 0, "forward", 0, 19);
  part(step.backward, 4, "backward", 0, 19);
  part(step.optimizer, 2, "optimizer step", 0, 19);
  x = 0;
  part(step.exposed, 1, "exposed communication", 22, 8);
  part(step.hidden, 3, "hidden communication", 22, 8);
  absl::StrAppend(html, "</svg></div><span>", Quantity(step.total, "ms"),
                  "</span></div>\n");
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
  absl::StrAppend(html,
                  "<figure class=\"chart\"><figcaption>steps, means over "
                  "ranks</figcaption>\n");
  for (size_t i = 0; i < bars; ++i) AddBar(summary.steps[i], longest, html);
  absl::StrAppend(html, "<ul class=\"legend\">");
  const std::pair<int, const char*> keys[] = {{0, "forward"},
                                              {4, "backward"},
                                              {2, "optimizer step"},
                                              {1, "exposed communication"},
                                              {3, "hidden communication"}};
  for (const auto& [color, name] : keys) {
    absl::StrAppend(html, "<li><span class=\"key b", color, "\"></span>", name,
                    "</li>");
  }
  absl::StrAppend(html, "</ul></figure>\n");
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
        html, "<tr><td class=\"name\">%s</td><td>%s</td><td>%s</td><td>%s</td>",
        EscapeHtml(wait.unit.empty()
                       ? absl::StrCat(wait.reason, ", ", wait.what)
                       : absl::StrCat(wait.reason, " of unit ", wait.unit)),
        ShortNumber(wait.total, "ms"), CountText(wait.count),
        ShortNumber(wait.longest, "ms"));
    for (const double ms : wait.by_cause) {
      if (ms < 0.005) {
        absl::StrAppend(html, "<td></td>");
      } else {
        absl::StrAppend(html, "<td>", ShortNumber(ms, "ms"), "</td>");
      }
    }
    absl::StrAppend(html, "</tr>\n");
  }
  absl::StrAppend(html, "</table></div>\n");
  AddLeftOut(kMostWaits, summary.waits.size(), "waits", html);
}

void AddRanks(const TraceSummary& summary, std::string* html) {
  if (summary.rank_summaries.size() < 2) return;
  absl::StrAppend(html,
                  "<h3>Ranks, means of a step in ms</h3>\n<div "
                  "class=\"scroll\"><table><tr><th>rank</th><th>step</th>"
                  "<th>own work</th><th>exposed</th><th>others waited for "
                  "it</th></tr>\n");
  for (const RankSummary& rank : summary.rank_summaries) {
    absl::StrAppend(html, "<tr><td>", rank.rank, "</td>");
    for (const double ms :
         {rank.step, rank.work, rank.exposed, rank.others_waited}) {
      absl::StrAppend(html, "<td>", ShortNumber(ms, "ms"), "</td>");
    }
    absl::StrAppend(html, "</tr>\n");
  }
  absl::StrAppend(html, "</table></div>\n");
}

}  // namespace

std::string TraceSection(const TraceSummary& summary) {
  std::string html = "<section id=\"trace\"><h2>Trace</h2>\n";
  AddBars(summary, &html);
  AddWaitTable(summary, &html);
  AddRanks(summary, &html);
  for (const std::string& note : summary.notes) {
    absl::StrAppend(&html, "<p class=\"note\">", EscapeHtml(note), "</p>\n");
  }
  absl::StrAppend(&html, "</section>\n");
  return html;
}

}  // namespace tessera
