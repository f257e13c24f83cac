// StepMemoryReporter: reports the memory of an engine's steps: reports, the
// printed table, recordings.
#ifndef ENGINE_TRAIN_STEP_MEMORY_REPORTER_H_
#define ENGINE_TRAIN_STEP_MEMORY_REPORTER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "base/step_memory/step_memory.h"
#include "engine/model/sharded_model.h"

namespace tessera {

namespace proto {
class Config;
}

class StepMemoryReporter {
 public:
  // Both outlive this.
  StepMemoryReporter(const ShardedModel* model, const proto::Config* config)
      : model_(*model), config_(*config) {}

  // Begins to count memory for a step, and to record it if the configuration
  // asks for it. Called when Create has ended.
  void Begin();
  // Ends an optimizer step and returns its report; prints it and writes the
  // recording, if the configuration asks for it. LOCAL.
  StepMemoryReport EndStep();
  // Ends the counting: the engine trains no more.
  void End() {
    device_.reset();
    training_.reset();
  }

  // These calls are Engine's of the same names.
  void RecordMemory() { StepMemory::Global().Record(); }
  absl::Status WriteMemoryTimeline(const std::string& prefix);

 private:
  // Adds the device's memory to `report`, which is the host's. REQUIRES:
  // device_.
  StepMemoryReport ReportOfDevice(StepMemoryReport report);
  bool IsRecorded(int64_t step) const;

  const ShardedModel& model_;
  const proto::Config& config_;
  std::optional<StepMemory::Training> training_;
  std::optional<DeviceMemory> device_;      // none: the CPU
  std::optional<MemoryTimeline> timeline_;  // the last one
  int64_t steps_ = 0;                       // since Create
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_STEP_MEMORY_REPORTER_H_
