// Monitor: what a program adds to the metrics of its engine
// (docs/monitoring.md).
//
//   engine->monitor().SetTokensPerSample(2048);       // once
//   engine->monitor().AddScalar("eval/loss", loss);   // goes where the rest
//   goes
//
// It goes to the writers that the configuration enables (tensorboard,
// csv_monitor, jsonl_monitor), on rank 0; elsewhere, and where none is enabled,
// the calls do nothing, so that a program may always make them. What is added
// belongs to the last optimizer step, and is written with its metrics; before
// the first one to that.
//
// Threads: as the engine's, one at a time.
#ifndef ENGINE_OBSERVE_MONITOR_H_
#define ENGINE_OBSERVE_MONITOR_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "engine/observe/step_record.h"
#include "monitor/step_metrics.h"

namespace tessera {

class Monitor {
 public:
  // Tags are paths ("eval/loss"). A number may be NaN. LOCAL.
  void AddScalar(absl::string_view tag, double value);
  void AddText(absl::string_view tag, absl::string_view text);
  // Of any shape, dtype (not complex) and device, which is waited for. LOCAL.
  void AddHistogram(absl::string_view tag, const at::Tensor& values);

  // Tokens, for tokens a second and what is computed for a token: of each
  // sample, from now on; or of this rank since the last optimizer step, added
  // up, which then count instead. LOCAL.
  void SetTokensPerSample(int64_t tokens) { tokens_per_sample_ = tokens; }
  void CountTokens(int64_t tokens) { tokens_ += tokens; }

  // Rank 0, and a writer is enabled. LOCAL.
  bool writes() const { return writes_; }
  // The metrics of the last step that all ranks have told theirs of, one or two
  // steps behind; the same on all ranks but for what is each one's own. Null
  // before, and where nothing is enabled. LOCAL.
  const StepRecord* last() const { return last_.get(); }

 private:
  friend class StepObserver;

  bool writes_ = false;
  int64_t tokens_per_sample_ = 0;
  int64_t tokens_ = 0;
  StepMetrics added_;  // since the last step
  std::shared_ptr<const StepRecord> last_;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_MONITOR_H_
