// Reads the folder of a run: metrics.jsonl, run.json, traces.
//
// A file that is still being written may end in half a line, and a run that was
// resumed has some steps twice. So a line that is no JSON object is left out,
// with a note; of two lines of a step the later one counts, except that each
// skipped step keeps its own beside the line of the step made before it. A line
// of an earlier step than the line before it is of a newer process, which began
// there: later steps of the older one are left out, with a note if they were
// not made again. Lines of "eval..." alone belong to the line of their step.
#ifndef REPORT_RUN_FILES_H_
#define REPORT_RUN_FILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "config/reader/json_reader.h"
#include "report/trace_summary.h"

namespace tessera {

struct RunFiles {
  std::string folder;
  std::vector<double> steps;  // in order
  // By name, values as long as `steps`; NaN: absent. Members of objects have
  // names such as "memory.parameters".
  std::map<std::string, std::vector<double>> series;
  // The series that are there up to the end but are not finite, with the step
  // from which on none of their values is.
  std::map<std::string, double> diverged;
  // The lines of metrics.jsonl, in the order of the file; those of steps that
  // are left out, too, but none of evaluations alone.
  struct Line {
    double step = 0;
    double time = 0;  // Unix seconds; NaN: absent
    bool skipped = false;
  };
  std::vector<Line> lines;
  std::optional<JsonValue> run;  // run.json
  // Pages of memory_timeline in the folder: names of files, and "rank 0".
  std::vector<std::pair<std::string, std::string>> memory_pages;
  // The path from the folder of the page that is made to `folder`; "": the same
  // folder.
  std::string from_page;
  std::optional<TraceSummary> traces;  // of all trace files
  std::vector<std::string> notes;
};

// Returns the files trace.rank*.json in `folder`, or if it has none in its
// folder "trace", in the order of their ranks.
std::vector<std::string> TracesIn(const std::string& folder);

// Returns the path from the folder of the file `page` to `folder`, links in
// both resolved; "" if that is where the page is. Neither need exist. LOCAL.
std::string PathFromPage(const std::string& page, const std::string& folder);

// Reads the folder. Returns NotFound if there is nothing to show, with the
// names of folders of runs one or two levels below it. LOCAL.
absl::StatusOr<RunFiles> ReadRunFolder(const std::string& folder);

// Reads the lines of metrics.jsonl; `name` is for notes.
void ReadMetrics(absl::string_view text, absl::string_view name, RunFiles* run);

}  // namespace tessera
#endif  // REPORT_RUN_FILES_H_
