// How a step's gradient leaves the memory of its device, and who may still be
// reading it there.
//
// Why it leaves on a stream of its own: a copy to the host takes as long as a
// unit's kernels do, and on the stream of the hooks the kernels of backward
// would wait for it. So the memory is being read after the call that copies it.
// From stage 2 on the copy has that memory until FinishStore. At stage 1 it is
// the local flat gradient, which stays: whoever writes there next comes after
// the copy (OrderAfterCopy).
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "base/torch_guard.h"
#include "offload/update_stream.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {

FlatGradient::~FlatGradient() {
  (void)CatchTorch("gradient", [this] { OrderAfterCopy(); });
}

absl::Status FlatGradient::StartCopyTo(TieredBuffer* host) {
  TESSERA_CHECK(elsewhere() == nullptr) << flat_->name();
  TESSERA_RETURN_IF_ERROR(
      host->room().StartCopyFrom({0, host->numel()}, coming()));
  copied_ = host->room().filled();
  return absl::OkStatus();
}

void FlatGradient::OrderAfterCopy() {
  std::exchange(copied_, StreamPoint()).Order();
}

// An update that was begun early may be reading the step's gradient, which is
// about to be another: it does not count then.
absl::Status FlatGradient::AwaitReaders() {
  OrderAfterCopy();
  const auto& stream = flat_->options().stream;
  const bool read = stream != nullptr &&
                    (flat_->device().is_cpu() || flat_->updated_on_host());
  return read && has_step_gradient() ? stream->Drain() : absl::OkStatus();
}

// To where it is to be, if that is elsewhere: the last step may still be
// reading the one of before.
absl::Status FlatGradient::StartStore() {
  const FlatParameterOptions& options = flat_->options();
  if (options.gradients_tier == Tier::kMemory || !reduced_.defined()) {
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(flat_->states().updated().Wait());
  TESSERA_RETURN_IF_ERROR(
      flat_->states().Ensure(ShardStates::kGradient, reduced_.dtype(),
                             options.PlaceOf(options.gradients_tier)));
  ForgetMeasured();
  if (measure_) measured_ = measure_(*this, reduced_.View());
  TESSERA_RETURN_IF_ERROR(stored().StartStore(std::move(reduced_)));
  is_stored_ = true;
  return absl::OkStatus();
}

void FlatGradient::ForgetStored() {
  is_stored_ = false;
  ForgetMeasured();
}

// It goes back to the stream that it was allocated for.
void FlatGradient::ForgetMeasured() {
  if (measured_.defined()) KeepForCurrentStream(measured_);
  measured_.reset();
}

absl::Status FlatGradient::FinishStore() {
  return is_stored_ ? stored().FinishStore() : absl::OkStatus();
}

}  // namespace tessera
