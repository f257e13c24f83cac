// MetricsWriter: a format in which metrics are written.
//
//   metrics.jsonl          jsonl_writer.h
//   a CSV file for a tag   csv_writer.h
//   TensorBoard's events   event_writer.h
//
// Each Open returns FileError's (PermissionDenied, ResourceExhausted where the
// disk is full, ...), which name the path.
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

  // Hands all of it to the operating system: who reads the files sees it, and a
  // process that is killed has lost nothing. After an error some of it may be
  // there; the next call goes on behind that. FileError's. LOCAL, blocking.
  virtual absl::Status Write(const StepMetrics& metrics) = 0;
  // Waits until what was written is on the disk. FileError's. LOCAL.
  virtual absl::Status Flush() = 0;
  // The file or folder, for messages.
};

}  // namespace tessera
#endif  // MONITOR_METRICS_WRITER_H_
