// Reports what a rank held when an allocation failed, for out-of-memory errors.
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

// Returns lines for a log, without a newline at the end: what was held by kind
// when an allocation last failed, the peak until then, and the five units with
// the most bytes, by kind; with a plan also what was planned, and two changes
// that would fit. The engine may be half made; `plan` null: there is none.
// LOCAL.
std::string HeldReport(const ShardedModel& model,
                       const Optimization& optimization, const PlanReport* plan,
                       const StepMemory::Refusal& refusal);

// RefusalReport: lives for a call of an engine, and adds what this rank held to
// the call's error if an allocation of this process failed meanwhile. Failures
// of other ranks are not reported. On a device, whose allocator reports no
// failures, every ResourceExhausted counts.
class RefusalReport {
 public:
  // All arguments outlive it.
  RefusalReport(const ShardedModel* model, const Optimization* optimization,
                const PlanReport* plan)
      : model_(*model),
        optimization_(*optimization),
        plan_(plan),
        before_(StepMemory::Global().refusals()) {}

  // Returns "" if no allocation failed, else a newline and HeldReport.
  std::string Text(const absl::Status& status) const;
  // Returns `status` with Text appended.
  absl::Status In(const absl::Status& status) const;

 private:
  const ShardedModel& model_;
  const Optimization& optimization_;
  const PlanReport* const plan_;
  const int64_t before_;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_HELD_REPORT_H_
