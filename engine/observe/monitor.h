// Monitor: what a program adds to the metrics of its engine
// (docs/monitoring.md).
//
//   engine->monitor().SetTokensPerSample(2048);      // once
//   engine->monitor().AddScalar("eval/loss", loss);  // written with the rest
//
// Metrics go to the writers that the configuration enables (tensorboard,
// csv_monitor, jsonl_monitor) and to EngineOptions::metrics_writers, on rank 0;
// on other ranks, and where there is none, the calls do nothing, so a program
// may always make them. What is
// added belongs to the last optimizer step and is written with its metrics;
// what is added before the first step belongs to that one.
//
// Threads: as for the engine, one at a time.
#ifndef ENGINE_OBSERVE_MONITOR_H_
#define ENGINE_OBSERVE_MONITOR_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "engine/observe/step_record.h"
#include "monitor/metrics_writer.h"  // IWYU pragma: export
#include "monitor/step_metrics.h"

namespace tessera {

class Monitor {
 public:
  // Adds a number or a text. Tags are paths ("eval/loss"). A number may be NaN.
  // LOCAL.
  void AddScalar(absl::string_view tag, double value);
  void AddText(absl::string_view tag, absl::string_view text);
  // Adds a histogram of values of any shape, device and dtype except complex
  // ones; waits for the device. LOCAL.
  void AddHistogram(absl::string_view tag, const at::Tensor& values);

  // Set the number of tokens, for tokens per second and operations per token:
  // per sample, from now on; or of this rank since the last optimizer step,
  // added up, which replaces the number per sample. LOCAL.
  void SetTokensPerSample(int64_t tokens) { tokens_per_sample_ = tokens; }
  void CountTokens(int64_t tokens) { tokens_ += tokens; }
  int64_t tokens_per_sample() const { return tokens_per_sample_; }
  // Return the model's number of parameters, and the operations per second that
  // a rank's device can do in 16 bits (flops_profiler.peak_tflops, or a table
  // of GPUs); 0: not known. LOCAL.
  int64_t parameters() const { return parameters_; }
  double peak_flops() const { return peak_flops_; }

  // Whether this is rank 0 and a writer is enabled. LOCAL.
  bool writes() const { return writes_; }
  // Returns the metrics of the last step whose exchange between ranks has
  // ended, one or two steps behind; identical on all ranks, except for what is
  // each rank's own. Null before that, and where nothing is enabled. LOCAL.
  const StepRecord* last() const { return last_.get(); }

 private:
  friend class StepObserver;

  bool writes_ = false;
  int64_t tokens_per_sample_ = 0;
  int64_t tokens_ = 0;
  int64_t parameters_ = 0;
  double peak_flops_ = 0;
  StepMetrics added_;  // since the last step
  std::shared_ptr<const StepRecord> last_;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_MONITOR_H_
