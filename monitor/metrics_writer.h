// MetricsWriter is a format in which metrics are written.
//
//   metrics.jsonl          jsonl_writer.h
//   a CSV file for a tag   csv_writer.h
//   TensorBoard's events   event_writer.h
//
// Each Open returns errors of FileError (PermissionDenied, ResourceExhausted
// where the disk is full, ...), which name the path.
//
// Threads: none; calls come from one thread at a time.
#ifndef MONITOR_METRICS_WRITER_H_
#define MONITOR_METRICS_WRITER_H_

#include <string>

#include "absl/status/status.h"
#include "monitor/step_metrics.h"

namespace tessera {

class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;

  // Hands all of it to the operating system: readers of the files see it, and a
  // process that is killed has lost nothing. After an error some of it may be
  // there; the next call continues behind that. Errors are those of FileError.
  // LOCAL, blocking.
  virtual absl::Status Write(const StepMetrics& metrics) = 0;
  // Waits until what was written is on the disk. Errors are those of FileError.
  // LOCAL.
  virtual absl::Status Flush() = 0;
};

}  // namespace tessera
#endif  // MONITOR_METRICS_WRITER_H_
