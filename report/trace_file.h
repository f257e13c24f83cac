// Reads a trace that base/trace has written: spans by track.
#ifndef REPORT_TRACE_FILE_H_
#define REPORT_TRACE_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/reader/json_reader.h"

namespace tessera {

// Times are microseconds of the host's monotonic clock.
struct SpanRecord {
  std::string track, name, unit;
  double begin = 0, end = 0;
  int64_t bytes = -1;
  std::string wait;       // for a wait: its reason ("gather")
  std::string op, group;  // for a collective
  int64_t sequence = 0;   // of a collective in its group
  double queued = 0;      // time before it began
  bool ahead = false;     // for a gather: it began before it was asked for
  int64_t step = 0;       // for whole steps: their number, and
  int64_t update = 0;     // the number of steps made or skipped until then
};

struct TraceFile {
  std::string path;
  int rank = 0, world_size = 1;
  std::string host;
  int64_t left_out = 0;            // spans that were not kept
  std::vector<SpanRecord> events;  // by begin
};

// Reads JSON that may be large. Returns InvalidArgument with path, line and
// column.
absl::StatusOr<JsonValue> ReadLargeJson(const std::string& path);

// Reads a trace. Returns errors of FileError, and InvalidArgument naming `path`
// if it is no trace of Tessera's. LOCAL.
absl::StatusOr<TraceFile> ReadTraceFile(const std::string& path);

// Returns one file that holds the events of all; each is a JSON object with
// traceEvents (traces, recordings of memory). LOCAL.
absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& paths);

}  // namespace tessera
#endif  // REPORT_TRACE_FILE_H_
