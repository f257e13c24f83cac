// StepOutcome: the outcome of an optimizer step. On the CPU it is known when
// the step has been made. A device decides by itself whether to skip the step;
// its scalars (optim/device_kernels.h) are copied to pinned memory, and the
// host waits for them only when it asks.
//
//   step n     norm, scalars --copy--> host     AdamW reads factor and skip
//   backward   asks the device (Skipped)        ... of step n + 1
//   step n+1   Take: by now it has come
//
// Threads: outside order.
#ifndef OPTIM_STEP_OUTCOME_H_
#define OPTIM_STEP_OUTCOME_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optim/gradients/non_finite.h"
#include "optim/step_scalars.h"

namespace tessera {

struct ShardedStepResult {
  bool skipped = false;
  // Norms of the gradients divided by the divisor, before clipping and after;
  // NaN if the options do not ask for it.
  double grad_norm = std::numeric_limits<double>::quiet_NaN();
  double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  // Norms of each group of parameters that is clipped by a norm of its own;
  // empty where no group is.
  struct Norms {
    double grad_norm = std::numeric_limits<double>::quiet_NaN();
    double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  };
  std::vector<Norms> groups;
  // The gradients that were not finite in a skipped step, where the options ask
  // for it.
  std::vector<NonFiniteGradient> non_finite;
};

class StepOutcome {
 public:
  // Makes an outcome that is known.
  explicit StepOutcome(const ShardedStepResult& result);
  // Makes a pending outcome of `scalars`, which the current stream writes as
  // FinishNorm does with `ranks` sums; starts the copy to the host. ASYNC: on
  // that stream. Throws c10::Error.
  StepOutcome(const at::Tensor& scalars, const NormFinish& finish,
              int64_t ranks);
  ~StepOutcome();
  StepOutcome(StepOutcome&&) noexcept;
  StepOutcome& operator=(StepOutcome&&) noexcept;

  // Whether Take may have to wait for the device.
  bool pending() const { return pending_ != nullptr; }
  // Whether it is pending and the step may turn out to be skipped.
  bool may_be_skipped() const;
  // Whether it has to be taken only for the norm: the step was not skipped and
  // has not failed.
  bool only_reports() const;

  // Returns whether the step was skipped, as a bool tensor, [], on the device,
  // for the current stream. ASYNC. REQUIRES: pending().
  at::Tensor Skipped();
  // Returns the outcome; waits until the device has computed the norm, not for
  // the update. Internal: replicas have different gradients, or an error of the
  // device. LOCAL.
  absl::StatusOr<ShardedStepResult> Take();

 private:
  struct Pending;
  ShardedStepResult result_;
  std::unique_ptr<Pending> pending_;  // null: result_ is known
};

}  // namespace tessera
#endif  // OPTIM_STEP_OUTCOME_H_
