#include "report/command.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/trace/trace_json.h"
#include "report/report_page.h"
#include "report/run_files.h"
#include "report/trace_file.h"
#include "report/trace_summary.h"

namespace tessera {
namespace {

// Replaces a folder by its traces, in the order of their names.
absl::StatusOr<std::vector<std::string>> FilesOf(
    const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (std::filesystem::path(path).extension() == ".jsonl") {
      return absl::InvalidArgumentError(absl::StrCat(
          path,
          ": holds metrics and is no trace; `tessera report FOLDER` "
          "shows it"));
    }
    if (!std::filesystem::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    const std::vector<std::string> found = TracesIn(path);
    if (found.empty()) {
      return absl::NotFoundError(
          absl::StrCat(path,
                       ": holds no trace.rank*.json; enable the `trace` "
                       "section of the configuration"));
    }
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

absl::StatusOr<TraceSummary> SummaryOf(const std::vector<std::string>& paths) {
  TESSERA_ASSIGN_OR_RETURN(const auto files, FilesOf(paths));
  std::vector<TraceFile> traces;
  for (const std::string& file : files) {
    TESSERA_ASSIGN_OR_RETURN(TraceFile trace, ReadTraceFile(file));
    traces.push_back(std::move(trace));
  }
  return Summarize(traces);
}

int RunSummary(CommandCall* call) {
  int64_t top = 10;
  if (!call->ReadNumber("--top", 0, &top, 1000000)) return 2;
  const auto summary = SummaryOf(call->words());
  if (!summary.ok()) return call->Failed(summary.status());
  call->out() << (call->Has("--json")
                      ? SummaryToJson(*summary)
                      : SummaryToText(*summary, static_cast<int>(top)));
  return 0;
}

int RunMerge(CommandCall* call) {
  std::vector<std::string> from = call->words();
  const std::string to = from.back();
  from.pop_back();
  const auto files = FilesOf(from);
  if (!files.ok()) return call->Failed(files.status());
  // This covers the case that OUT was forgotten, and the last trace is in its
  // place.
  const bool read =
      std::any_of(files->begin(), files->end(), [&](const std::string& file) {
        std::error_code error;
        return std::filesystem::equivalent(file, to, error);
      });
  if (read || ReadTraceFile(to).ok()) {
    return call->Misused(absl::StrCat(
        to, ": is a recording, which would be lost; give another OUT, last"));
  }
  const auto merged = MergeTraces(*files);
  if (!merged.ok()) return call->Failed(merged.status());
  const absl::Status written = WriteFileAtomically(to, *merged);
  if (!written.ok()) return call->Failed(written);
  call->out() << to << ": " << files->size() << " files\n";
  return 0;
}

// Refuses a page in a folder that is not there, which a typing error may name.
absl::Status CheckFolderOf(const std::string& page) {
  const std::filesystem::path folder =
      std::filesystem::path(page).parent_path();
  if (folder.empty()) return absl::OkStatus();
  std::error_code error;
  const auto there = std::filesystem::status(folder, error);
  if (!std::filesystem::status_known(there) ||
      std::filesystem::is_directory(there)) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(
      absl::StrCat("--out=", page, ": there is no folder ", folder.string(),
                   "; make it first, or correct the name"));
}

int RunReport(CommandCall* call) {
  const std::string& folder = call->words()[0];
  const std::string to = call->Get(
      "--out", (std::filesystem::path(folder) / "report.html").string());
  if (to.empty()) return call->Misused("--out: expected a file");
  auto run = ReadRunFolder(folder);
  if (!run.ok()) return call->Failed(run.status());
  const absl::Status place = CheckFolderOf(to);
  if (!place.ok()) return call->Failed(place);
  run->from_page = PathFromPage(to, folder);
  const absl::Status written = WriteFileAtomically(to, ReportPage(*run));
  if (!written.ok()) return call->Failed(written);
  for (const std::string& note : run->notes) {
    call->err() << "note: " << note << "\n";
  }
  call->out() << to << "\n";
  return 0;
}

}  // namespace

std::vector<Command> ReportCommands() {
  return {
      {"trace summary",
       "FILE...",
       "Shows how long steps took, how much communication was exposed, and "
       "why.",
       "In a folder it reads all trace.rank*.json, which the `trace` section "
       "of a configuration writes.",
       {{"--top", "N", "Number of rows of waits (10)."},
        {"--json", "",
         "Prints JSON: {world_size, ranks, steps, by_rank, waits, rank_means, "
         "notes}."}},
       {"trace summary run7", "trace summary run7 --json"},
       RunSummary},
      {"trace merge",
       "FILE... OUT",
       "Merges the traces of several ranks, and memory recordings "
       "(memory_timeline), into one file for Perfetto.",
       "OUT is replaced.",
       {},
       {"trace merge run7 run7/all.json"},
       RunMerge},
      {"report",
       "RUN",
       "Makes a page about a run from metrics.jsonl, run.json and "
       "trace.rank*.json in the folder RUN.",
       "The page is one file that needs no network. It links to the pages of "
       "memory_timeline in RUN; with --out elsewhere they stay there, so move "
       "both together.",
       {{"--out", "FILE", "The page (RUN/report.html)."}},
       {"report run7", "report run7 --out run7.html"},
       RunReport},
  };
}

}  // namespace tessera
