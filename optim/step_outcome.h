// StepOutcome: what became of an optimizer step. On the CPU that is known when
// the step has been made. A device decides by itself whether to skip it, and
// tells the host later: its scalars (optim/device_kernels.h) come to pinned
// memory, behind which the host does not wait until it asks.
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
  // Of the gradients divided by the divisor, before clipping and after; NaN if
  // the options do not ask for it.
  double grad_norm = std::numeric_limits<double>::quiet_NaN();
  double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  // The same of each group of parameters that is clipped by a norm of its own;
  // none where no group is.
  struct Norms {
    double grad_norm = std::numeric_limits<double>::quiet_NaN();
    double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  };
  std::vector<Norms> groups;
  // Of a step that was skipped, where the options ask for it.
  std::vector<NonFiniteGradient> non_finite;
};

class StepOutcome {
 public:
  // Is known.
  explicit StepOutcome(const ShardedStepResult& result);
  // Is what the current stream writes into `scalars`, as FinishNorm does of
  // `ranks` sums. ASYNC: on that stream, to the host. Throws c10::Error.
  StepOutcome(const at::Tensor& scalars, const NormFinish& finish,
              int64_t ranks);
  ~StepOutcome();
  StepOutcome(StepOutcome&&) noexcept;
  StepOutcome& operator=(StepOutcome&&) noexcept;

  // Take may have to wait for the device.
  bool pending() const { return pending_ != nullptr; }
  // Not known, and it may turn out to be a step that was skipped.
  bool may_be_skipped() const;
  // Nobody but who wants to know of the norm has to Take it: the step was not
  // skipped, and has not failed.
  bool only_reports() const;

  // Whether it was skipped: bool, [], on the device, for the current stream.
  // ASYNC. REQUIRES: pending().
  at::Tensor Skipped();
  // Waits for the device, if that has not come to it yet: to the norm, not to
  // the update. Internal where replicas have other gradients, or of the device.
  // LOCAL.
  absl::StatusOr<ShardedStepResult> Take();

 private:
  struct Pending;
  ShardedStepResult result_;
  std::unique_ptr<Pending> pending_;  // null: result_ is known
};

// The gradients of ranks [first, first + group_size) are not those of the first
// `group_size`, whose replicas they are.
absl::Status ReplicasDiffer(int64_t first, int64_t group_size);

}  // namespace tessera
#endif  // OPTIM_STEP_OUTCOME_H_
