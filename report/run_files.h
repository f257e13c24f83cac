// The folder of a run: metrics.jsonl, run.json, traces.
//
// What is written while a run goes on may end in half a line, and a run that
// was continued has some steps twice. So a line that is no JSON object is left
// out, with a note; of two lines of a step the later one counts, except that
// each skipped step keeps its own beside the line of the step made before it.
#ifndef REPORT_RUN_FILES_H_
#define REPORT_RUN_FILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/reader/json_reader.h"
#include "report/trace_summary.h"

namespace tessera {

struct RunFiles {
  std::string folder;
  std::vector<double> steps;  // in order
  // By name, as long as `steps`; NaN: not there. Members of objects are
  // "memory.parameters".
  std::map<std::string, std::vector<double>> series;
  std::optional<JsonValue> run;        // run.json
  std::optional<TraceSummary> traces;  // of all that are there
  std::vector<std::string> notes;
};

// trace.rank*.json in `folder`, or where it has none in its folder "trace", in
// the order of their ranks.
std::vector<std::string> TracesIn(const std::string& folder);

// NotFound where there is nothing to show. LOCAL.
absl::StatusOr<RunFiles> ReadRunFolder(const std::string& folder);

// metrics.jsonl's lines; `name` is for notes.
void ReadMetrics(absl::string_view text, absl::string_view name, RunFiles* run);

}  // namespace tessera
#endif  // REPORT_RUN_FILES_H_
