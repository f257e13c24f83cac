// Writes recordings as files: JSON in Chrome's trace event format, which
// Perfetto (ui.perfetto.dev) and chrome://tracing open.
//
// Each rank is one process (pid), each track one thread; where spans of a track
// overlap, further threads get its name ("gather 2"). Times are microseconds of
// MonotonicNow(), which the processes of a host share, so that files of ranks
// of one host line up, as those of memory_timeline do.
#ifndef BASE_TRACE_TRACE_JSON_H_
#define BASE_TRACE_TRACE_JSON_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/trace/trace.h"

namespace tessera {

struct TraceProcess {
  int rank = 0;
  int world_size = 1;
  std::string host;  // clocks of other hosts are others
};

std::string TraceToJson(const TraceRecording& recording,
                        const TraceProcess& process);

// Writes `text` to `path` as a whole: a reader finds the old file or the new
// one, and after an error the old one. Creates the folder of `path`.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view text);

}  // namespace tessera
#endif  // BASE_TRACE_TRACE_JSON_H_
