// What a step is, by the norm of its gradients: what they are multiplied by,
// and whether it is skipped. The host finds the norm, or a device that has
// kernels for it (optim/device_kernels.h), and then the outcome is not known
// yet.
#ifndef OPTIM_STEP_DECISION_H_
#define OPTIM_STEP_DECISION_H_

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "optim/sharded_optimizer.h"
#include "optim/step_outcome.h"
#include "optim/unit_step.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

struct ShardedStepOptions {
  double max_norm = 0;   // 0: no clipping
  double norm_type = 2;  // p > 0, or infinity
  double max_value = 0;  // 0: elements are not clipped
  // By group of the optimizer: adaptive clipping of its parameters' units,
  // after max_value and before the norms (optim/gradients/adaptive_clipping.h);
  // 0: none. Empty: no group has one. On a device the host computes the norms
  // then.
  std::vector<double> adaptive_clipping;
  double adaptive_eps = 1e-3;
  // By group of the optimizer: replaces max_norm, for the group's own norm.
  // Empty: no group has one. On a device the host computes the norms then.
  std::vector<std::optional<double>> group_max_norms;
  // A step with a gradient that is not finite is skipped, on all ranks.
  bool skip_on_overflow = false;
  bool report_norm = false;  // even if nothing else needs it
  // The result of a skipped step lists its gradients that are not finite,
  // before clipping of values. This waits for a device's norm.
  bool name_overflows = false;

  // Whether gradients are changed in place before the optimizer reads them
  // (optim/gradients).
  bool changes_gradients() const {
    return max_value > 0 || !group_max_norms.empty() ||
           !adaptive_clipping.empty();
  }
};

// Has each gradient that leaves its device measured there before, for the norm
// of a step with these options, so that none comes back for it. Does nothing
// where DecideStep would not look at them, or something changes them first.
// Once, before the first backward. LOCAL.
void MeasureBeforeLeaving(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const ShardedStepOptions& options, const ShardedOptimizer& optimizer,
    Gradients* gradients);

struct StepDecision {
  GradientFactor factor;
  StepOutcome outcome;
};

// Decides a step of the gradients / divisor. Where groups have norms of their
// own, gradients are multiplied by the factors of clipping here
// (ShardedOptimizer::NoteChangedGradients). `comm`: all ranks, those of the
// units' shard group and its replicas, in this order. Internal if norms differ
// between replicas; ResourceExhausted, errors of a disk. COLLECTIVE where a
// norm is asked for: one small exchange.
absl::StatusOr<StepDecision> DecideStep(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    Gradients* gradients, double divisor, const ShardedStepOptions& options,
    ShardedOptimizer* optimizer, Communicator* comm);

}  // namespace tessera
#endif  // OPTIM_STEP_DECISION_H_
