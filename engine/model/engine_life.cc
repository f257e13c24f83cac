#include "engine/model/engine_life.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::Status EngineLife::CheckOpen() const {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  if (!half_stepped_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "called between Backward and Step: with sharding.step_in_backward units "
      "are stepped already, and their gradients gone; call Step first, or "
      "leave that key out");
}

absl::Status EngineLife::CheckUsable() const {
  if (closed_) return absl::FailedPreconditionError("the engine was closed");
  TESSERA_RETURN_IF_ERROR(lost_);
  const Gradients* const gradients = optimization_->gradients();
  if (gradients != nullptr && gradients->runs()) {
    return absl::FailedPreconditionError(
        "called within an Engine::Backward, by a hook or another thread: call "
        "it when that has returned");
  }
  return absl::OkStatus();
}

absl::Status EngineLife::CheckNotAveraged() const {
  if (!averaged_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the parameters are their averages; call Engine::SwapOutAverages first");
}

absl::Status EngineLife::CheckNotSummoned() const {
  if (summoned_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("[", (*summoned_.begin())->name(),
                   "] a scope of Engine::Summon is open; Close() it first"));
}

void EngineLife::Lose(const absl::Status& status) {
  lost_.Update(absl::Status(
      status.code(),
      absl::StrCat(
          status.message(),
          " (so the model's states are neither the old nor the new ones: "
          "continue from a checkpoint, in a new engine)")));
}

}  // namespace tessera
