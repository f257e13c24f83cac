// The memory of an engine's steps: reports, the printed table, recordings.
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

  // Create has ended: memory is counted for a step, and recorded if the
  // configuration asks for it.
  void Begin();
  // An optimizer step has ended. The report; it is printed and the recording
  // written, if the configuration asks for it. LOCAL.
  StepMemoryReport EndStep();
  // The engine trains no more.
  void End() {
    device_.reset();
    training_.reset();
  }

  // As Engine's of these names.
  void RecordMemory() { StepMemory::Global().Record(); }
  absl::Status WriteMemoryTimeline(const std::string& prefix);

 private:
  // `report` is the host's. REQUIRES: device_.
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
