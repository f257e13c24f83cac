#include "report/command.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/trace/trace_json.h"
#include "report/report_page.h"
#include "report/run_files.h"
#include "report/trace_file.h"
#include "report/trace_summary.h"

namespace tessera {
namespace {

constexpr char kUsage[] =
    "usage: tessera trace summary FILE... [--json] [--top=N]\n"
    "  How long steps took, what of their communication was exposed, and why;\n"
    "  of a folder all its trace.rank*.json. --top: rows of waits, 10.\n"
    "usage: tessera trace merge FILE... OUT\n"
    "  One file for Perfetto of several ranks' traces, and of recordings of\n"
    "  memory (memory_timeline). OUT is replaced.\n"
    "usage: tessera report RUN [--out=FILE]\n"
    "  A page of a run, RUN/report.html, of what metrics.jsonl, run.json and\n"
    "  trace.rank*.json in RUN say. It needs no network.\n";

int Fail(const absl::Status& status, std::ostream* err) {
  *err << status.message() << "\n";
  return 1;
}

// Replaces a folder by its traces, in the order of their names.
absl::StatusOr<std::vector<std::string>> FilesOf(
    const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
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

int RunSummary(const std::vector<std::string>& args, std::ostream* out,
               std::ostream* err) {
  bool json = false;
  int top = 10;
  std::vector<std::string> paths;
  for (const std::string& arg : args) {
    absl::string_view value = arg;
    if (arg == "--json") {
      json = true;
    } else if (absl::ConsumePrefix(&value, "--top=")) {
      if (!absl::SimpleAtoi(value, &top) || top < 0) {
        *err << "--top: expected a number of rows, got '" << value << "'\n";
        return 2;
      }
    } else if (absl::StartsWith(arg, "--")) {
      *err << "tessera trace summary: unknown flag " << arg << "\n" << kUsage;
      return 2;
    } else {
      paths.push_back(arg);
    }
  }
  if (paths.empty()) {
    *err << kUsage;
    return 2;
  }
  const auto summary = SummaryOf(paths);
  if (!summary.ok()) return Fail(summary.status(), err);
  *out << (json ? SummaryToJson(*summary) : SummaryToText(*summary, top));
  return 0;
}

int RunMerge(std::vector<std::string> args, std::ostream* out,
             std::ostream* err) {
  if (args.size() < 2) {
    *err << kUsage;
    return 2;
  }
  for (const std::string& arg : args) {
    if (!absl::StartsWith(arg, "--")) continue;
    *err << "tessera trace merge: unknown flag " << arg << "\n" << kUsage;
    return 2;
  }
  const std::string to = args.back();
  args.pop_back();
  const auto files = FilesOf(args);
  if (!files.ok()) return Fail(files.status(), err);
  // This covers the case that OUT was forgotten, and the last trace is in its
  // place.
  const bool read =
      std::any_of(files->begin(), files->end(), [&](const std::string& file) {
        std::error_code error;
        return std::filesystem::equivalent(file, to, error);
      });
  if (read || ReadTraceFile(to).ok()) {
    *err << to
         << ": is a recording, which would be lost; give another OUT, last\n";
    return 2;
  }
  const auto merged = MergeTraces(*files);
  if (!merged.ok()) return Fail(merged.status(), err);
  const absl::Status written = WriteFileAtomically(to, *merged);
  if (!written.ok()) return Fail(written, err);
  *out << to << ": " << files->size() << " files\n";
  return 0;
}

}  // namespace

int RunTraceCommand(const std::vector<std::string>& args, std::ostream* out,
                    std::ostream* err) {
  const std::string command = args.empty() ? "" : args[0];
  std::vector<std::string> rest;
  if (!args.empty()) rest.assign(args.begin() + 1, args.end());
  if (command == "summary") return RunSummary(rest, out, err);
  if (command == "merge") return RunMerge(std::move(rest), out, err);
  *err << kUsage;
  return 2;
}

int RunReportCommand(const std::vector<std::string>& args, std::ostream* out,
                     std::ostream* err) {
  std::string folder, to;
  for (const std::string& arg : args) {
    absl::string_view value = arg;
    if (absl::ConsumePrefix(&value, "--out=") && !value.empty()) {
      to = std::string(value);
    } else if (absl::StartsWith(arg, "--") || !folder.empty()) {
      *err << "tessera report: did not expect '" << arg << "'\n" << kUsage;
      return 2;
    } else {
      folder = arg;
    }
  }
  if (folder.empty()) {
    *err << kUsage;
    return 2;
  }
  auto run = ReadRunFolder(folder);
  if (!run.ok()) return Fail(run.status(), err);
  if (to.empty()) {
    to = (std::filesystem::path(folder) / "report.html").string();
  }
  const absl::Status written = WriteFileAtomically(to, ReportPage(*run));
  if (!written.ok()) return Fail(written, err);
  for (const std::string& note : run->notes) *err << "note: " << note << "\n";
  *out << to << "\n";
  return 0;
}

}  // namespace tessera
