// Optimization: owns the gradients of a step, their scale, and the optimizer
// that steps with them. Gradients exist from Engine::Create to Close; an
// optimizer where the configuration has one.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_MODEL_OPTIMIZATION_H_
#define ENGINE_MODEL_OPTIMIZATION_H_

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "optim/schedule/loss_scaler.h"
#include "optim/sharded_optimizer.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class Optimization {
 public:
  // ---- Engine::Create's ----
  void SetScaler(LossScaler scaler) { scaler_ = std::move(scaler); }
  void SetOptimizer(std::unique_ptr<ShardedOptimizer> optimizer) {
    optimizer_ = std::move(optimizer);
  }
  void SetGradients(std::unique_ptr<Gradients> gradients) {
    gradients_ = std::move(gradients);
  }
  // Called when the engine ends: first DropGradients, then DropOptimizer.
  void DropGradients() { gradients_.reset(); }
  void DropOptimizer() { optimizer_.reset(); }

  Gradients* gradients() const { return gradients_.get(); }
  ShardedOptimizer* optimizer() const { return optimizer_.get(); }
  LossScaler* scaler() { return scaler_.has_value() ? &*scaler_ : nullptr; }
  const LossScaler* scaler() const {
    return scaler_.has_value() ? &*scaler_ : nullptr;
  }

  // Whether the step's Backwards have weights, as Trainer sets it; absent:
  // there was no Backward yet.
  std::optional<bool> weighted() const { return weighted_; }
  void SetWeighted(bool weighted) { weighted_ = weighted; }
  double loss_scale() const {
    return scaler_.has_value() ? scaler_->scale() : 1;
  }
  // Returns FailedPrecondition if every weight of the step is 0, identical on
  // all ranks. REQUIRES: gradients. LOCAL.
  absl::Status CheckHasSamples() const {
    if (!weighted_.value_or(false) || gradients_->total_weight() != 0) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(
        "Step: no rank had data (every weight of the step is 0); ask "
        "Engine::AnyRankHasData before a forward, and call ZeroGrad to "
        "continue");
  }
  // Drops the step's gradients and forgets their weights. REQUIRES: gradients.
  // LOCAL.
  void EndStep() {
    gradients_->Zero();
    weighted_.reset();
  }
  // Returns what the step's gradients are divided by at the end. REQUIRES:
  // gradients.
  double divisor() const {
    const double scale = loss_scale();
    return weighted_.value_or(false) ? scale * gradients_->weight_divisor()
                                     : scale;
  }

 private:
  std::optional<LossScaler> scaler_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::unique_ptr<Gradients> gradients_;
  std::optional<bool> weighted_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_OPTIMIZATION_H_
