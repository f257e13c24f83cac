// PlannedRun: one forward and backward of a module on tensors without memory,
// with its parameters divided, and what that costs a rank.
#ifndef PARALLEL_PLAN_PLANNED_RUN_H_
#define PARALLEL_PLAN_PLANNED_RUN_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "parallel/plan/placement_walk.h"
#include "parallel/plan/planned_parameters.h"
#include "parallel/plan/tensor_plan.h"
#include "parallel/tensor/placed.h"

namespace tessera {

// How each parameter is divided, by number: kStaysWhole, kByUse, or
// DividedAlong.
using PartDims = std::vector<int64_t>;
inline constexpr int64_t kStaysWhole = -1;
inline constexpr int64_t kByUse = -2;  // as a PlacementWalk says

inline constexpr int64_t kMostDims = 64;
inline int64_t DividedAlong(const TensorPlacement& placement) {
  return placement.dim + kMostDims * (placement.groups - 1);
}
inline TensorPlacement PlacementOf(int64_t divided) {
  return TensorPlacement::Shard(divided % kMostDims, divided / kMostDims + 1);
}

struct PlannedRun {
  int64_t collectives = 0, bytes = 0, flops = 0;
  double seconds = 0;  // TensorPlan::seconds
  std::vector<std::string> gathered;
  // How parameters were divided by use, and which of these decisions came first
  // to an operator without a rule.
  std::vector<PlacementWalk::Decision> decisions;
  std::optional<size_t> first_gathered;
  bool gathers_parameters = false;
};

// What is planned.
struct PlanSubject {
  const torch::nn::Module* module = nullptr;  // outlives it
  int ranks = 1;
  std::vector<PlannedParameter> parameters;  // of the module
  std::function<at::Tensor()> loss;
  TensorPlanOptions options;
};

// Runs it. Errors are those of TakeTrace, and of operators that have no way for
// the parts.
absl::StatusOr<PlannedRun> RunPlanned(const PlanSubject& subject,
                                      const PartDims& dims);

// Sets what `plan` says of parameters that are divided by `dims`.
void SetParts(const PlanSubject& subject, const PartDims& dims,
              TensorPlan* plan);
// Sets what it says of a micro-batch. `whole` is the module's run with nothing
// divided.
void SetCosts(const PlannedRun& run, const PlannedRun& whole, TensorPlan* plan);

}  // namespace tessera
#endif  // PARALLEL_PLAN_PLANNED_RUN_H_
