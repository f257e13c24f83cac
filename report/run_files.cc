#include "report/run_files.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/page/page_style.h"
#include "base/status.h"
#include "report/trace_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxBytes = int64_t{1} << 30;
constexpr size_t kMostMemoryPages = 64;
constexpr size_t kMostNamedRuns = 4;
constexpr int kMostEntries = 1000;  // of a folder that may hold runs
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

using Row = std::map<std::string, double>;

// Reads numbers, and those that JSON has no word for, which are strings.
std::optional<double> NumberIn(const JsonValue& value) {
  if (value.kind == JsonKind::kNumber) return value.number;
  if (value.kind != JsonKind::kString) return std::nullopt;
  if (value.text == "NaN") return kNone;
  if (value.text == "Infinity") return std::numeric_limits<double>::infinity();
  if (value.text == "-Infinity")
    return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

void AddMembers(const JsonValue& object, const std::string& prefix, int depth,
                Row* row) {
  for (const JsonMember& member : object.members) {
    const std::string name = absl::StrCat(prefix, member.key);
    if (name == "texts" || name == "histograms") continue;
    if (const auto number = NumberIn(member.value); number.has_value()) {
      (*row)[name] = *number;
    } else if (member.value.kind == JsonKind::kObject && depth < 3) {
      AddMembers(member.value, absl::StrCat(name, "."), depth + 1, row);
    }
  }
}

absl::StatusOr<bool> Exists(const std::string& path) {
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (error) return FileError(error.value(), path);
  return there;
}

// Reads traces. A broken trace must not hide the rest of the page.
void ReadTraces(const std::vector<std::string>& paths, RunFiles* run) {
  std::vector<TraceFile> traces;
  for (const std::string& path : paths) {
    auto trace = ReadTraceFile(path);
    if (trace.ok()) {
      traces.push_back(*std::move(trace));
    } else {
      run->notes.push_back(std::string(trace.status().message()));
    }
  }
  if (traces.empty()) return;
  auto summary = Summarize(traces);
  if (summary.ok()) {
    run->traces = *std::move(summary);
  } else {
    run->notes.push_back(std::string(summary.status().message()));
  }
}

// Returns the rank in "<title>Memory of step 3, rank 0</title>"; "" if the file
// does not begin like that.
std::string RankOfMemoryPage(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string head(512, '\0');
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<size_t>(file.gcount()));
  absl::string_view text = head;
  const size_t title = text.find(absl::StrCat("<title>", kMemoryPageTitle));
  const size_t end = text.find("</title>");
  if (title == text.npos || end == text.npos || end < title) return "";
  text = text.substr(title, end - title);
  const size_t rank = text.rfind("rank ");
  return rank == text.npos ? "" : std::string(text.substr(rank));
}

void FindMemoryPages(const std::string& folder, RunFiles* run) {
  std::error_code error;
  struct Page {
    std::string file, rank;
    fs::file_time_type written;
  };
  std::map<int, Page> pages;  // of each rank the newest
  for (fs::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const fs::path& path = at->path();
    std::error_code no;
    if (path.extension() != ".html" || !fs::is_regular_file(path, no)) continue;
    const std::string rank = RankOfMemoryPage(path);
    int number = 0;
    if (!absl::SimpleAtoi(absl::StripPrefix(rank, "rank "), &number)) continue;
    Page page{path.filename().string(), rank, fs::last_write_time(path, no)};
    const auto [it, first] = pages.try_emplace(number, page);
    if (!first && it->second.written < page.written) it->second = page;
  }
  for (const auto& [number, page] : pages) {
    if (run->memory_pages.size() < kMostMemoryPages) {
      run->memory_pages.emplace_back(page.file, page.rank);
    }
  }
}

double ValueIn(const Row& row, const char* key) {
  const auto it = row.find(key);
  return it == row.end() ? kNone : it->second;
}

// Returns whether all figures of a line are of an evaluation ("eval/loss").
bool IsOfEvaluation(const Row& row) {
  bool any = false;
  for (const auto& [key, value] : row) {
    if (key == "step" || key == "time" || key == "samples") continue;
    if (!absl::StartsWith(key, "eval")) return false;
    any = true;
  }
  return any;
}

// Collects rows by their step. Skipped steps, which have the number of the last
// step made, are ordered by how many were skipped after it.
class Rows {
 public:
  // The step, and 0 or the number of a step skipped after it.
  using Place = std::pair<double, double>;

  // Adds the line of a step. Where it goes back, a process has begun from an
  // earlier step, and later steps of the one before it are cut off.
  void Add(double step, Row row) {
    const auto of = [&](const char* name) {
      const double value = ValueIn(row, name);
      return std::isfinite(value) ? value : 0.0;
    };
    // Files of versions that counted skipped steps as steps have no "skipped".
    const double number =
        of("skipped") == 0 ? 0.0 : std::max(1.0, of("skipped_steps"));
    const Place place = {step, number};
    if (place < last_) CutAfter(place, ValueIn(row, "time"));
    last_ = place;
    if (number == 0) {
      rows_.erase(rows_.lower_bound(place), rows_.upper_bound({step, kMost}));
    }
    rows_[place] = std::move(row);
  }

  // Adds figures of an evaluation to the row of the step.
  void AddEvaluation(double step, Row row) {
    const auto after = rows_.upper_bound({step, kMost});
    if (after == rows_.begin() || std::prev(after)->first.first != step) {
      rows_[{step, 0}] = std::move(row);
      return;
    }
    Row& to = std::prev(after)->second;
    for (const auto& [key, value] : row) {
      if (absl::StartsWith(key, "eval")) to[key] = value;
    }
  }
  const std::map<Place, Row>& in_order() const { return rows_; }
  // Returns what was cut off and not made again; "": nothing.
  std::string LeftOut() const {
    int count = 0;
    double first = 0, last = 0;
    for (const Place& place : cut_) {
      if (!rows_.empty() && place <= rows_.rbegin()->first) continue;
      first = count == 0 ? place.first : std::min(first, place.first);
      last = count == 0 ? place.first : std::max(last, place.first);
      ++count;
    }
    if (count == 0) return "";
    const std::string steps =
        first == last ? absl::StrFormat("step %.0f", first)
                      : absl::StrFormat("steps %.0f to %.0f", first, last);
    return absl::StrCat(count, count == 1 ? " line" : " lines",
                        " of an earlier run in this folder ",
                        count == 1 ? "is" : "are", " left out (", steps, ")");
  }

 private:
  static constexpr double kMost = std::numeric_limits<double>::infinity();

  // Lines of a later time are not of an earlier process: several write.
  void CutAfter(const Place& place, double time) {
    for (auto it = rows_.upper_bound(place); it != rows_.end();) {
      if (ValueIn(it->second, "time") > time) {
        ++it;
        continue;
      }
      cut_.push_back(it->first);
      it = rows_.erase(it);
    }
  }

  std::map<Place, Row> rows_;
  std::vector<Place> cut_;
  Place last_ = {-kMost, 0};  // of the line before
};

void FillSeries(const Rows& rows, RunFiles* run) {
  for (const auto& [place, row] : rows.in_order()) {
    for (const auto& [key, value] : row) {
      if (key == "step") continue;
      std::vector<double>& values = run->series[key];
      values.resize(run->steps.size(), kNone);
      values.push_back(value);
      if (std::isfinite(value)) {
        run->diverged.erase(key);
      } else {
        run->diverged.try_emplace(key, place.first);
      }
    }
    run->steps.push_back(place.first);
  }
  for (auto& [key, values] : run->series) {
    values.resize(run->steps.size(), kNone);
  }
}

// Adds folders of runs in `folder`, down to `depth` folders below it.
void FindRuns(const fs::path& folder, int depth,
              std::vector<std::string>* found) {
  std::error_code error;
  int left = kMostEntries;
  for (fs::directory_iterator at(folder, error), end;
       !error && at != end && left > 0; at.increment(error), --left) {
    const fs::path& path = at->path();
    std::error_code no;
    if (!fs::is_directory(path, no)) continue;
    if (fs::exists(path / "metrics.jsonl", no) ||
        fs::exists(path / "run.json", no)) {
      found->push_back(path.string());
    }
    if (depth > 1) FindRuns(path, depth - 1, found);
  }
}

absl::Status NothingToShow(const std::string& folder) {
  std::vector<std::string> below;
  FindRuns(folder, 2, &below);
  std::sort(below.begin(), below.end());
  if (below.size() > kMostNamedRuns) below.resize(kMostNamedRuns);
  const std::string what =
      below.empty() ? "enable jsonl_monitor or trace in the configuration, and "
                      "give the folder that they write to"
                    : absl::StrCat("give the folder of the run itself: ",
                                   absl::StrJoin(below, " or "));
  return absl::NotFoundError(absl::StrCat(
      folder, ": holds none of metrics.jsonl, run.json and trace.rank*.json; ",
      what));
}

}  // namespace

std::vector<std::string> TracesIn(const std::string& folder) {
  std::vector<std::pair<int, std::string>> found;
  for (const fs::path& place : {fs::path(folder), fs::path(folder) / "trace"}) {
    std::error_code error;
    for (fs::directory_iterator at(place, error), end; !error && at != end;
         at.increment(error)) {
      const fs::directory_entry& entry = *at;
      const std::string name = entry.path().filename().string();
      absl::string_view rank = name;
      int number = 0;
      if (absl::ConsumePrefix(&rank, "trace.rank") &&
          absl::ConsumeSuffix(&rank, ".json") &&
          absl::SimpleAtoi(rank, &number)) {
        found.emplace_back(number, entry.path().string());
      }
    }
    if (!found.empty()) break;
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [rank, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::string PathFromPage(const std::string& page, const std::string& folder) {
  std::error_code error;
  const fs::path from =
      fs::weakly_canonical(fs::absolute(page, error).parent_path(), error);
  fs::path to = fs::weakly_canonical(fs::absolute(folder, error), error);
  if (!to.has_filename()) to = to.parent_path();  // "run/"
  const fs::path path = to.lexically_relative(from);
  return path == "." ? "" : path.string();
}

void ReadMetrics(absl::string_view text, absl::string_view name,
                 RunFiles* run) {
  Rows rows;
  int line_number = 0, broken = 0, first_broken = 0;
  std::string why;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const auto json = ReadJson(line, name);
    Row row;
    if (json.ok() && json->kind == JsonKind::kObject) {
      AddMembers(*json, "", 0, &row);
    }
    const auto step = row.find("step");
    if (step == row.end() || !std::isfinite(step->second)) {
      if (broken++ == 0) first_broken = line_number;
      continue;
    }
    const double number = step->second;
    if (IsOfEvaluation(row)) {
      rows.AddEvaluation(number, std::move(row));
      continue;
    }
    run->lines.push_back(
        {number, ValueIn(row, "time"), ValueIn(row, "skipped") > 0});
    rows.Add(number, std::move(row));
  }
  if (broken > 0) {
    run->notes.push_back(absl::StrCat(
        name, ": ", broken, broken == 1 ? " line is" : " lines are",
        " no whole JSON object with a step, the first is line ", first_broken,
        broken == 1 && first_broken == line_number
            ? " (the last: the run was still writing, or was killed)"
            : "",
        "; left out"));
  }
  if (const std::string left_out = rows.LeftOut(); !left_out.empty()) {
    run->notes.push_back(absl::StrCat(name, ": ", left_out));
  }
  FillSeries(rows, run);
}

absl::StatusOr<RunFiles> ReadRunFolder(const std::string& folder) {
  RunFiles run;
  run.folder = folder;
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": expected the folder of a run, there is none"));
  }
  const std::string metrics = (fs::path(folder) / "metrics.jsonl").string();
  const std::string about = (fs::path(folder) / "run.json").string();
  const std::vector<std::string> traces = TracesIn(folder);
  TESSERA_ASSIGN_OR_RETURN(const bool has_metrics, Exists(metrics));
  TESSERA_ASSIGN_OR_RETURN(const bool has_run, Exists(about));
  if (!has_metrics && !has_run && traces.empty()) {
    return NothingToShow(folder);
  }
  if (has_metrics) {
    TESSERA_ASSIGN_OR_RETURN(const std::string text,
                             ReadRegularFile(metrics, kMaxBytes));
    ReadMetrics(text, "metrics.jsonl", &run);
  }
  if (has_run) {
    auto json = ReadLargeJson(about);
    if (json.ok() && json->kind == JsonKind::kObject) {
      run.run = *std::move(json);
    } else {
      run.notes.push_back(json.ok() ? "run.json: expected a JSON object"
                                    : std::string(json.status().message()));
    }
  }
  ReadTraces(traces, &run);
  FindMemoryPages(folder, &run);
  if (const auto loss = run.diverged.find("loss"); loss != run.diverged.end()) {
    run.notes.push_back(absl::StrFormat(
        "the loss is not finite from step %.0f on", loss->second));
  }
  if (run.steps.empty()) {
    run.notes.push_back(
        has_metrics ? "metrics.jsonl holds no step: none has been reported yet"
                    : "there is no metrics.jsonl, so nothing of steps is "
                      "shown: jsonl_monitor writes it");
  }
  return run;
}

}  // namespace tessera
