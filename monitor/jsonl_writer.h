// JsonlWriter writes metrics.jsonl, one JSON object per line for each step:
//
//   {"step": 3, "samples": 24, "time": 1764302400.25, "loss": 2.5, ...,
//    "texts": {"tag": "..."}, "histograms": {"tag": {"min": ..., "max": ...,
//    "sum": ..., "count": ..., "limits": [...], "counts": [...]}}}
//
// step, samples and time (seconds since 1970) come first; then the scalars by
// their names, those of the program by their tags. A number that is not known
// is absent. One that is not finite is a string: "NaN", "Infinity" or
// "-Infinity". "texts" and "histograms" are absent if there are none. If a name
// occurs twice the last one counts, as in JSON's readers.
//
// An existing file is continued; half a line at its end, from a writer that was
// killed, is ended first. A run that resumed from a checkpoint may have some
// steps twice: the later line counts.
#ifndef MONITOR_JSONL_WRITER_H_
#define MONITOR_JSONL_WRITER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "monitor/metrics_writer.h"

namespace tessera {

// `path` is the file, whose folder is created.
absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenJsonlWriter(
    const std::string& path);

// Returns one such line, with its newline.
std::string JsonLine(const StepMetrics& metrics);

}  // namespace tessera
#endif  // MONITOR_JSONL_WRITER_H_
