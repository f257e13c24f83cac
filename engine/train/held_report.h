// What a rank held when memory was refused, for the errors that say so.
#ifndef ENGINE_TRAIN_HELD_REPORT_H_
#define ENGINE_TRAIN_HELD_REPORT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "base/step_memory/step_memory.h"
#include "engine/model/optimization.h"
#include "engine/model/sharded_model.h"

namespace tessera {

struct PlanReport;  // engine/plan/plan.h

// Lines for a log, without a newline at the end: what was held by kind when
// memory was last refused, the peak until then, and the five units with the
// most bytes, these by kind; with EngineOptions::plan what was planned, and two
// changes that would fit. The engine may be half made; `plan` null: there is
// none. LOCAL.
std::string HeldReport(const ShardedModel& model,
                       const Optimization& optimization, const PlanReport* plan,
                       const StepMemory::Refusal& refusal);

// For a call of an engine: what it returns says what this rank held, if memory
// was refused to this process while it ran. Of another rank's refusal nothing
// is said. On a device, whose allocator tells nobody, every ResourceExhausted
// counts.
class RefusalReport {
 public:
  // All of these outlive it.
  RefusalReport(const ShardedModel* model, const Optimization* optimization,
                const PlanReport* plan)
      : model_(*model),
        optimization_(*optimization),
        plan_(plan),
        before_(StepMemory::Global().refusals()) {}

  // "" if nothing was refused, else a newline and HeldReport.
  std::string Text(const absl::Status& status) const;
  // `status` with Text.
  absl::Status In(const absl::Status& status) const;

 private:
  const ShardedModel& model_;
  const Optimization& optimization_;
  const PlanReport* const plan_;
  const int64_t before_;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_HELD_REPORT_H_
