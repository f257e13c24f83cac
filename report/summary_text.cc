#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "report/trace_summary.h"

namespace tessera {
namespace {

double PercentOf(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

void AddSteps(const TraceSummary& summary, std::string* text) {
  absl::StrAppend(text,
                  "    step     total   forward  backward optimizer "
                  "communication    hidden   exposed\n");
  for (const StepSummary& s : summary.steps) {
    absl::StrAppendFormat(text,
                          "%8d %9.2f %9.2f %9.2f %9.2f %13.2f %9.2f %9.2f "
                          "(%.1f %%)\n",
                          s.step, s.total, s.forward, s.backward, s.optimizer,
                          s.communication, s.hidden, s.exposed,
                          PercentOf(s.exposed, s.total));
  }
}

// Adds only what occurred.
void AddRest(const TraceSummary& summary, std::string* text) {
  if (summary.steps.empty()) return;
  std::vector<const StepSummary*> steps;
  for (const StepSummary& step : summary.steps) steps.push_back(&step);
  const StepSummary mean = MeanOf(steps);
  absl::StrAppend(text, "\na step's mean:\n");
  for (const auto& [reason, ms] : mean.exposed_by_reason) {
    absl::StrAppendFormat(text, "%9.2f ms exposed: %s (%.0f %% of it)\n", ms,
                          reason, PercentOf(ms, mean.exposed));
  }
  const auto line = [&](double ms, absl::string_view what) {
    if (ms > 0) absl::StrAppendFormat(text, "%9.2f ms %s\n", ms, what);
  };
  line(mean.recompute, "computing activations again");
  line(mean.update_wait, "waiting for this rank's own updates");
  line(mean.disk_wait, "waiting for the disk");
  const auto disk = [&](double ms, int64_t bytes, absl::string_view what) {
    if (ms <= 0) return;
    const double mb =
        static_cast<double>(bytes) / 1e6 / static_cast<double>(steps.size());
    absl::StrAppendFormat(
        text,
        "%9.2f ms with %s under way, %.1f MB of all ranks, "
        "%.0f MB/s a rank\n",
        ms, what, mb,
        mb / ms * 1e3 / static_cast<double>(summary.ranks.size()));
  };
  disk(mean.disk_read, mean.disk_bytes_read, "reads of the disk");
  disk(mean.disk_write, mean.disk_bytes_written, "writes to the disk");
}

std::string WhyText(const WaitSummary& wait) {
  std::vector<std::pair<double, std::string>> parts;
  for (int i = 0; i < kNumWaitCauses; ++i) {
    const auto cause = static_cast<WaitCause>(i);
    const double percent =
        PercentOf(wait.by_cause[static_cast<size_t>(i)], wait.total);
    if (percent < 5) continue;
    std::string words(WaitCauseName(cause));
    if (cause == WaitCause::kPeerLate && !wait.by_late_rank.empty()) {
      auto latest = wait.by_late_rank.begin();
      for (auto it = latest; it != wait.by_late_rank.end(); ++it) {
        if (it->second > latest->second) latest = it;
      }
      words = absl::StrCat("rank ", latest->first, " came late");
      if (wait.by_late_rank.size() > 1) {
        words = absl::StrCat("others came late, rank ", latest->first, " most");
      }
    }
    if (cause == WaitCause::kPrefetchedLate) {
      absl::StrAppendFormat(&words, " (%.2f ms ahead)", wait.lead);
    }
    parts.emplace_back(percent, absl::StrFormat("%s %.0f %%", words, percent));
  }
  std::stable_sort(
      parts.begin(), parts.end(),
      [](const auto& a, const auto& b) { return a.first > b.first; });
  return absl::StrJoin(parts, ", ", [](std::string* out, const auto& part) {
    absl::StrAppend(out, part.second);
  });
}

void AddWaits(const TraceSummary& summary, int most, std::string* text) {
  if (summary.waits.empty()) {
    absl::StrAppend(text, "\nno wait for communication was exposed\n");
    return;
  }
  absl::StrAppend(text,
                  "\nexposed waits, all steps and ranks:\n"
                  " total ms  waits  longest  for\n");
  int rows = 0;
  for (const WaitSummary& wait : summary.waits) {
    if (rows++ == most) break;
    absl::StrAppendFormat(text, "%9.2f %6d %8.2f  %s%s: %s\n", wait.total,
                          wait.count, wait.longest, wait.reason,
                          wait.unit.empty()
                              ? absl::StrCat(", ", wait.what)
                              : absl::StrCat(" of unit ", wait.unit),
                          WhyText(wait));
  }
  const int left = static_cast<int>(summary.waits.size()) - most;
  if (left > 0) absl::StrAppend(text, "... and ", left, " more\n");
}

void AddRankTable(const TraceSummary& summary, std::string* text) {
  if (summary.rank_summaries.size() < 2) return;
  absl::StrAppend(text,
                  "\nranks, means of a step in ms:\n"
                  "    rank      step  own work   exposed  others waited for "
                  "it\n");
  for (const RankSummary& rank : summary.rank_summaries) {
    absl::StrAppendFormat(text, "%8d %9.2f %9.2f %9.2f %9.2f\n", rank.rank,
                          rank.step, rank.work, rank.exposed,
                          rank.others_waited);
  }
}

std::string StepJson(const StepSummary& s) {
  std::string json = absl::StrCat("{\"step\":", s.step, ",\"rank\":", s.rank);
  for (const StepTime& time : kStepTimes) {
    absl::StrAppendFormat(&json, ",\"%s_ms\":%.6f", time.name, s.*time.ms);
  }
  absl::StrAppend(&json, ",\"disk_bytes_read\":", s.disk_bytes_read,
                  ",\"disk_bytes_written\":", s.disk_bytes_written,
                  ",\"exposed_by_reason_ms\":{");
  absl::StrAppend(&json,
                  absl::StrJoin(s.exposed_by_reason, ",",
                                [](std::string* out, const auto& each) {
                                  absl::StrAppendFormat(out, "%s:%.6f",
                                                        QuoteJson(each.first),
                                                        each.second);
                                }),
                  "}}");
  return json;
}

std::string WaitJson(const WaitSummary& wait) {
  std::string json = absl::StrFormat(
      "{\"reason\":%s,\"unit\":%s,\"what\":%s,\"count\":%d,\"total_ms\":%.6f,"
      "\"longest_ms\":%.6f,\"lead_ms\":%.6f,\"by_cause_ms\":{",
      QuoteJson(wait.reason), QuoteJson(wait.unit), QuoteJson(wait.what),
      wait.count, wait.total, wait.longest, wait.lead);
  for (int i = 0; i < kNumWaitCauses; ++i) {
    absl::StrAppendFormat(&json, "%s%s:%.6f", i == 0 ? "" : ",",
                          QuoteJson(WaitCauseName(static_cast<WaitCause>(i))),
                          wait.by_cause[static_cast<size_t>(i)]);
  }
  absl::StrAppend(&json, "},\"by_late_rank_ms\":{",
                  absl::StrJoin(wait.by_late_rank, ",",
                                [](std::string* out, const auto& each) {
                                  absl::StrAppendFormat(out, "\"%d\":%.6f",
                                                        each.first,
                                                        each.second);
                                }),
                  "}}");
  return json;
}

template <typename List, typename F>
std::string ListJson(const List& list, const F& to_json) {
  return absl::StrCat("[",
                      absl::StrJoin(list, ",\n",
                                    [&](std::string* out, const auto& each) {
                                      absl::StrAppend(out, to_json(each));
                                    }),
                      "]");
}

}  // namespace

std::string SummaryToText(const TraceSummary& summary, int most_waits) {
  std::string text =
      absl::StrCat("trace of rank", summary.ranks.size() == 1 ? " " : "s ",
                   absl::StrJoin(summary.ranks, ", "), " of ",
                   summary.world_size, "; milliseconds, means over ranks\n");
  AddSteps(summary, &text);
  AddRest(summary, &text);
  AddWaits(summary, most_waits, &text);
  AddRankTable(summary, &text);
  for (const std::string& note : summary.notes) {
    absl::StrAppend(&text, "note: ", note, "\n");
  }
  return text;
}

std::string SummaryToJson(const TraceSummary& summary) {
  return absl::StrCat(
      "{\"world_size\":", summary.world_size, ",\"ranks\":[",
      absl::StrJoin(summary.ranks, ","),
      "],\n\"steps\":", ListJson(summary.steps, StepJson),
      ",\n\"by_rank\":", ListJson(summary.by_rank, StepJson),
      ",\n\"waits\":", ListJson(summary.waits, WaitJson), ",\n\"rank_means\":",
      ListJson(summary.rank_summaries,
               [](const RankSummary& rank) {
                 return absl::StrFormat(
                     "{\"rank\":%d,\"step_ms\":%.6f,\"own_work_ms\":%.6f,"
                     "\"exposed_ms\":%.6f,\"others_waited_ms\":%.6f}",
                     rank.rank, rank.step, rank.work, rank.exposed,
                     rank.others_waited);
               }),
      ",\n\"notes\":",
      ListJson(summary.notes,
               [](const std::string& note) { return QuoteJson(note); }),
      "}\n");
}

}  // namespace tessera
