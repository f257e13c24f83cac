// JsonlWriter: metrics.jsonl, an object on a line for each step:
//
//   {"step": 3, "samples": 24, "time": 1764302400.25, "loss": 2.5, ...,
//    "texts": {"tag": "..."}, "histograms": {"tag": {"min": ..., "max": ...,
//    "sum": ..., "count": ..., "limits": [...], "counts": [...]}}}
//
// step, samples and time (seconds since 1970) come first; then the scalars by
// their names, those of the program by their tags. A number that is not known
// is absent. One that is not finite is a string: "NaN", "Infinity" or
// "-Infinity". "texts" and "histograms" are absent without any. Of two of one
// name the last one counts, as JSON's readers have it.
//
// A file that is there is continued; half a line at its end, of a writer that
// was killed, is ended first. Of a run that has gone on from a checkpoint some
// steps may be there twice: the later line counts.
#ifndef MONITOR_JSONL_WRITER_H_
#define MONITOR_JSONL_WRITER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "monitor/metrics_writer.h"

namespace tessera {

// `path`: of the file, whose folder is made.
absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenJsonlWriter(
    const std::string& path);

// One such line, with its end.
std::string JsonLine(const StepMetrics& metrics);

}  // namespace tessera
#endif  // MONITOR_JSONL_WRITER_H_
