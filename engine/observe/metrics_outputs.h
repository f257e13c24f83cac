// MetricsOutputs: the writers that a configuration enables and those of the
// program, on rank 0.
#ifndef ENGINE_OBSERVE_METRICS_OUTPUTS_H_
#define ENGINE_OBSERVE_METRICS_OUTPUTS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "monitor/metrics_writer.h"
#include "monitor/step_metrics.h"

namespace tessera {

namespace proto {
class Config;
}

class MetricsOutputs {
 public:
  // Whether any writer is enabled.
  static bool Wanted(const proto::Config& config);
  // Opens all enabled writers, and adds `own`. Errors are FileError's, with the
  // section that names the path; InvalidArgument: a null pointer. LOCAL.
  static absl::StatusOr<MetricsOutputs> Open(
      const proto::Config& config,
      const std::vector<std::shared_ptr<MetricsWriter>>& own);
  // Takes the writers that Open opens, or others in their place.
  explicit MetricsOutputs(std::vector<std::shared_ptr<MetricsWriter>> writers);

  // Writes with all writers. The first failure of each writer, also what it
  // throws, is logged as a warning; it is tried again with the next step.
  // Training goes on.
  void Write(const StepMetrics& metrics);
  void Flush();
  bool empty() const { return writers_.empty(); }

 private:
  struct Writer {
    std::shared_ptr<MetricsWriter> writer;
    bool warned = false;
  };
  void Warn(const absl::Status& status, Writer* of);

  std::vector<Writer> writers_;
};

// Returns the folder of jsonl_monitor's files.
std::string RunFolder(const proto::Config& config);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_METRICS_OUTPUTS_H_
