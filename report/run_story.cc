#include "report/run_story.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/page/page_numbers.h"
#include "report/html_text.h"

namespace tessera {
namespace {

constexpr size_t kMostToldResumes = 4;
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// A process that trained into the folder, as rank 0 described it.
struct Start {
  double time = kUnknown;
  int ranks = 0;
  double end = kUnknown;
  std::string how;
};

const JsonValue* Find(const RunFiles& run, absl::string_view key) {
  return run.run.has_value() ? run.run->Find(key) : nullptr;
}

int RanksOf(const JsonValue& object) {
  const double ranks = object.NumberAt("world_size", kUnknown);
  return ranks >= 1 && ranks < 1e9 ? static_cast<int>(ranks) : 0;
}

std::vector<Start> StartsOf(const RunFiles& run) {
  std::vector<Start> starts;
  if (!run.run.has_value()) return starts;
  const JsonValue* const list = run.run->Find("starts");
  if (list == nullptr || list->kind != JsonKind::kArray) {
    starts.push_back(
        {run.run->NumberAt("start_time", kUnknown), RanksOf(*run.run)});
    return starts;
  }
  for (const JsonValue& each : list->elements) {
    starts.push_back({each.NumberAt("time", kUnknown), RanksOf(each),
                      each.NumberAt("end_time", kUnknown), each.TextAt("end")});
  }
  return starts;
}

// The lines of one process in metrics.jsonl, in the order of the file.
struct Part {
  size_t begin = 0, end = 0;
  Start start;
};

// A process begins where the time of a start has come, and where a step is made
// again.
std::vector<Part> PartsOf(const RunFiles& run,
                          const std::vector<Start>& starts) {
  std::map<size_t, Start> begins;
  begins[0];
  for (size_t i = 1; i < run.lines.size(); ++i) {
    const RunFiles::Line& line = run.lines[i];
    if (!line.skipped && line.step <= run.lines[i - 1].step) begins[i];
  }
  for (const Start& start : starts) {
    for (size_t i = 0; i < run.lines.size(); ++i) {
      if (!(run.lines[i].time > start.time)) continue;
      begins[i] = start;
      break;
    }
  }
  std::vector<Part> parts;
  for (const auto& [begin, start] : begins) {
    if (!parts.empty()) parts.back().end = begin;
    parts.push_back({begin, run.lines.size(), start});
  }
  if (run.lines.empty()) parts.clear();
  return parts;
}

double SecondsOf(const RunFiles& run, const std::vector<Part>& parts) {
  double seconds = 0;
  for (const Part& part : parts) {
    const double first = run.lines[part.begin].time;
    const double last = run.lines[part.end - 1].time;
    const double begin = std::isnan(part.start.time) ? first : part.start.time;
    seconds += std::max(
        0.0, (std::isnan(part.start.end) ? last : part.start.end) - begin);
  }
  return parts.empty() ? kUnknown : seconds;
}

std::string StateOf(const RunFiles& run, const std::vector<Start>& starts) {
  const JsonValue* const list = Find(run, "starts");
  if (list == nullptr || starts.empty()) return "";
  const std::string& how = starts.back().how;
  if (how.empty()) return "still running, or killed";
  return how == "closed" ? "finished" : how;
}

std::string Ranks(int ranks) {
  return absl::StrCat(CountText(ranks), ranks == 1 ? " rank" : " ranks");
}

std::string StepText(double step) {
  return CountText(static_cast<int64_t>(std::clamp(step, -1e15, 1e15)));
}

// Returns "vm", or "a (4 ranks), b (4 ranks) and 6 more".
std::string Hosts(const RunFiles& run) {
  const JsonValue* const hosts = Find(run, "hosts");
  if (hosts == nullptr || hosts->kind != JsonKind::kArray) return "";
  std::vector<std::pair<std::string, int>> counts;
  for (const JsonValue& host : hosts->elements) {
    if (counts.empty() || counts.back().first != host.text) {
      counts.emplace_back(host.text, 0);
    }
    ++counts.back().second;
  }
  if (counts.size() == 1) return counts[0].first;
  std::vector<std::string> words;
  for (size_t i = 0; i < std::min<size_t>(4, counts.size()); ++i) {
    words.push_back(
        absl::StrCat(counts[i].first, " (", Ranks(counts[i].second), ")"));
  }
  std::string text = absl::StrJoin(words, ", ");
  if (counts.size() > 4) {
    absl::StrAppend(&text, " and ", counts.size() - 4, " more");
  }
  return text;
}

// What the last process ran on.
std::vector<std::string> Machine(const RunFiles& run) {
  std::vector<std::string> words;
  if (!run.run.has_value()) return words;
  const int ranks = RanksOf(*run.run);
  const std::string hosts = Hosts(run);
  if (ranks > 0) {
    words.push_back(
        absl::StrCat(Ranks(ranks), hosts.empty() ? "" : " on ", hosts));
  }
  for (const char* const key : {"device", "backend"}) {
    if (std::string text = run.run->TextAt(key); !text.empty()) {
      words.push_back(std::move(text));
    }
  }
  const double stage = run.run->NumberAt("stage", kUnknown);
  if (!std::isnan(stage)) words.push_back(absl::StrFormat("stage %g", stage));
  const double parameters = run.run->NumberAt("parameters", kUnknown);
  if (!std::isnan(parameters)) {
    words.push_back(absl::StrCat(StepText(parameters), " parameters"));
  }
  if (const std::string version = run.run->TextAt("version");
      !version.empty()) {
    words.push_back(absl::StrCat("Tessera ", version));
  }
  return words;
}

std::string Started(double time) {
  if (!(std::abs(time) < 1e12)) return "";
  return absl::FormatTime("started %Y-%m-%d %H:%M:%S UTC",
                          absl::FromUnixSeconds(static_cast<int64_t>(time)),
                          absl::UTCTimeZone());
}

// Returns "step 162 after 1 min 20 s; resumed at step 100 on 3 ranks".
std::string HowItWent(const RunFiles& run, const RunStory& story) {
  std::string text;
  if (!run.steps.empty()) {
    text = absl::StrCat("step ", StepText(run.steps.back()));
    if (story.seconds > 0) {
      absl::StrAppend(&text, " after ", DurationText(story.seconds));
    }
  }
  if (story.resumes.empty()) return text;
  if (story.first_ranks > 0) {
    absl::StrAppend(&text, "; begun on ", Ranks(story.first_ranks));
  }
  if (story.resumes.size() > kMostToldResumes) {
    absl::StrAppend(&text, "; resumed ", story.resumes.size(), " times; last ",
                    story.resumes.back().Title());
    return text;
  }
  for (const RunStory::Resume& resume : story.resumes) {
    absl::StrAppend(&text, "; ", resume.Title());
  }
  return text;
}

}  // namespace

std::string RunStory::Resume::Title() const {
  return absl::StrCat("resumed at step ", StepText(step),
                      ranks == 0 ? "" : absl::StrCat(" on ", Ranks(ranks)));
}

RunStory StoryOf(const RunFiles& run) {
  RunStory story;
  const std::vector<Start> starts = StartsOf(run);
  std::vector<Part> parts = PartsOf(run, starts);
  size_t anew = 0;  // the last part that began at the first step
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const RunFiles::Line& first = run.lines[part.begin];
    const double from = first.skipped ? first.step : first.step - 1;
    auto& resumes = story.resumes;
    while (!resumes.empty() && resumes.back().step >= from) resumes.pop_back();
    if (i == 0 || from <= 0) {
      anew = i;
      continue;
    }
    const int before = parts[i - 1].start.ranks;
    const int ranks = part.start.ranks;
    resumes.push_back(
        {from, ranks, before > 0 && ranks > 0 && before != ranks});
  }
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(anew));
  story.seconds = SecondsOf(run, parts);
  story.state = StateOf(run, starts);
  story.last_start_has_no_step = starts.size() > 1 && !run.lines.empty() &&
                                 run.lines.back().time < starts.back().time;
  if (!parts.empty()) {
    story.started = parts[0].start.time;
    story.first_ranks = parts[0].start.ranks;
    const double first = run.lines[parts.back().begin].step;
    story.last_process = static_cast<size_t>(
        std::lower_bound(run.steps.begin(), run.steps.end(), first) -
        run.steps.begin());
  } else if (!starts.empty()) {
    story.started = starts.back().time;
  }
  return story;
}

std::string HeadlineHtml(const RunFiles& run, const RunStory& story) {
  const std::string model = run.run.has_value() ? run.run->TextAt("model") : "";
  std::string html = absl::StrCat(
      "<h1>", EscapeHtml(model.empty() ? run.folder : model), "</h1>\n");
  const std::string state =
      story.state.empty() ? ""
                          : absl::StrCat("<span class=\"state\">",
                                         EscapeHtml(story.state), "</span>");
  std::string went = HowItWent(run, story);
  if (story.last_start_has_no_step) {
    absl::StrAppend(&went, "; the last start has made no step");
  }
  if (!state.empty() || !went.empty()) {
    absl::StrAppend(&html, "<p class=\"facts\">", state, EscapeHtml(went),
                    "</p>\n");
  }
  std::vector<std::string> words = Machine(run);
  if (std::string started = Started(story.started); !started.empty()) {
    words.push_back(std::move(started));
  }
  if (!model.empty()) words.push_back(run.folder);
  if (!words.empty()) {
    absl::StrAppend(&html, "<p class=\"facts soft\">",
                    EscapeHtml(absl::StrJoin(words, " \xC2\xB7 ")), "</p>\n");
  }
  const std::string command =
      run.run.has_value() ? run.run->TextAt("command") : "";
  if (!command.empty()) {
    absl::StrAppend(&html, "<p class=\"facts soft\"><code>",
                    EscapeHtml(command), "</code></p>\n");
  }
  if (!run.memory_pages.empty()) {
    absl::StrAppend(&html, "<p class=\"facts\">Memory of one step:");
    for (const auto& [name, title] : run.memory_pages) {
      const std::string path =
          run.from_page.empty() ? name : absl::StrCat(run.from_page, "/", name);
      absl::StrAppend(&html, " <a href=\"", EscapeHtml(LinkTo(path)), "\">",
                      EscapeHtml(title), "</a>");
    }
    absl::StrAppend(&html, "</p>\n");
  }
  return html;
}

}  // namespace tessera
