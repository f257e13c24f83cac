// MetricsWriter takes the metrics of each step: a format of files, or a
// program's own (EngineOptions::metrics_writers).
//
//   metrics.jsonl          jsonl_writer.h
//   a CSV file for a tag   csv_writer.h
//   TensorBoard's events   event_writer.h
//   a function             WriterOf
//
// Open of Tessera's own writers returns errors of FileError (PermissionDenied,
// ResourceExhausted where the disk is full, ...), which name the path.
//
// Threads: none; calls come from one thread at a time.
#ifndef MONITOR_METRICS_WRITER_H_
#define MONITOR_METRICS_WRITER_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "monitor/step_metrics.h"

namespace tessera {

class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;

  // Takes the metrics of a step, on rank 0, in the order of steps. Formats of
  // files hand all of it to the operating system: readers of the files see it,
  // and a process that is killed has lost nothing. After an error some of it
  // may be there; the next call continues behind that. The training waits for
  // this call, so a slow one belongs on a thread of the writer's own. LOCAL,
  // blocking.
  virtual absl::Status Write(const StepMetrics& metrics) = 0;
  // Waits until what was written is on the disk, or wherever it goes. Called as
  // the engine ends. LOCAL.
  virtual absl::Status Flush() { return absl::OkStatus(); }
};

// Returns a writer that calls `write` with the metrics of each step. LOCAL.
inline std::shared_ptr<MetricsWriter> WriterOf(
    std::function<absl::Status(const StepMetrics&)> write) {
  struct Function : MetricsWriter {
    absl::Status Write(const StepMetrics& metrics) override {
      return write(metrics);
    }
    std::function<absl::Status(const StepMetrics&)> write;
  };
  auto writer = std::make_shared<Function>();
  writer->write = std::move(write);
  return writer;
}

}  // namespace tessera
#endif  // MONITOR_METRICS_WRITER_H_
