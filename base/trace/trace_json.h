// A recording as a file: JSON in Chrome's trace event format, which Perfetto
// (ui.perfetto.dev) and chrome://tracing open.
//
// One process (pid) for each rank, one thread for each track; where spans of a
// track overlap, further threads of its name ("gather 2"). Microseconds of
// MonotonicNow(), which the processes of a host share: files of ranks of one
// host lie over each other, as those of memory_timeline do.
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
// one, and after an error the old one. Makes the folder that it lies in.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view text);

}  // namespace tessera
#endif  // BASE_TRACE_TRACE_JSON_H_
