// MetricsOutputs: the writers that a configuration enables, on rank 0.
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
  // Any of them is enabled.
  static bool Wanted(const proto::Config& config);
  // Opens all that are enabled. FileError's, with the section that names the
  // path. LOCAL.
  static absl::StatusOr<MetricsOutputs> Open(const proto::Config& config);
  // For what Open would open.
  explicit MetricsOutputs(std::vector<std::unique_ptr<MetricsWriter>> writers);

  // By all writers. What one cannot write goes to the log as a warning, the
  // first time; it is tried again with the next step. Training goes on.
  void Write(const StepMetrics& metrics);
  void Flush();
  bool empty() const { return writers_.empty(); }

 private:
  struct Writer {
    std::unique_ptr<MetricsWriter> writer;
    bool warned = false;
  };
  void Warn(const absl::Status& status, Writer* of);

  std::vector<Writer> writers_;
};

// Where jsonl_monitor's files are.
std::string RunFolder(const proto::Config& config);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_METRICS_OUTPUTS_H_
