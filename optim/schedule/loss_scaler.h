// LossScaler: the factor of the loss that keeps small float16 gradients from
// becoming zero. A static scale stays; a dynamic one follows overflows:
//
//   overflow        spends one of `hysteresis`; with one left it halves the
//                   scale instead, as do all that follow, down to min_scale
//   none for        doubles the scale and refills hysteresis
//   `window` steps
//
//   window 2, hysteresis 2:   . .  !  !  !   . .   !    (! overflow)
//   scale after it:           8 16 16 8  4   4 8   8
//
// It works as DeepSpeed's, with two differences: a scale ends at 2^127, the
// greatest power of 2 that a float32 loss can be multiplied by (DeepSpeed's
// becomes infinite), and options with which no scale could be found are
// refused. All ranks do the same, given the same overflows: those of any rank.
// Source: Micikevicius et al., "Mixed Precision Training", 2018. Threads: const
// methods may run concurrently; the others need outside order.
#ifndef OPTIM_SCHEDULE_LOSS_SCALER_H_
#define OPTIM_SCHEDULE_LOSS_SCALER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

// DeepSpeed's section "fp16"; other names there stand first in the comments.
struct LossScalerOptions {
  double static_scale = 0;       // loss_scale; 0: dynamic, then:
  int initial_scale_power = 16;  // the first scale is 2^this
  int64_t window = 1000;         // loss_scale_window, in steps; > 0
  int64_t hysteresis = 2;        // in overflows; > 0, 1 halves at once
  // Every step without overflow refills hysteresis.
  bool consecutive_hysteresis = false;
  double min_scale = 1;  // min_loss_scale; > 0
};

// The state of a scaler, for checkpoints.
struct LossScalerState {
  double scale = 0;
  int64_t clean_steps = 0;      // since the last overflow or doubling
  int64_t hysteresis_left = 0;  // 1: the next overflow halves
  int64_t skipped_steps = 0;    // in all
};

class LossScaler {
 public:
  // Makes a scaler. InvalidArgument names the option, as DeepSpeed calls it,
  // and its bounds.
  static absl::StatusOr<LossScaler> Create(const LossScalerOptions& options);

  // The factor of the loss of the next step, by which its gradients are
  // divided. The default, 65536, is infinite in float16.
  double scale() const { return state_.scale; }
  bool dynamic() const { return options_.static_scale == 0; }
  // Steps whose gradients overflowed.
  int64_t skipped_steps() const { return state_.skipped_steps; }

  // Updates the scale after each step. `overflow`: an element of its gradients
  // on any rank was not finite, so the step was skipped. LOCAL. OutOfRange if a
  // dynamic scale should be halved at min_scale; then only skipped_steps has
  // changed.
  absl::Status Update(bool overflow);
  // Whether an overflow in the next step would be that error. LOCAL.
  bool ends_at_overflow() const {
    return dynamic() && state_.hysteresis_left <= 1 &&
           state_.scale <= options_.min_scale;
  }

  const LossScalerState& state() const { return state_; }
  // Resumes from a saved state, under this scaler's options: a static scale
  // stays as it is, a dynamic one and hysteresis_left are moved to the nearest
  // that the options allow. DataLoss naming the field if no scaler could have
  // had that state; then nothing has changed. LOCAL.
  absl::Status Restore(const LossScalerState& state);

 private:
  explicit LossScaler(const LossScalerOptions& options);
  absl::Status Overflow();
  void CleanStep();

  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_LOSS_SCALER_H_
