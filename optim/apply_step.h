// Applies the decided step of a unit (optim/unit_step.h) to its states
// (offload/shard_states.h):
//
//   StepHere    at once, to all elements: what lies elsewhere is in memory for
//               the moment of it
//   StepSlices  behind the program, slice by slice, on the thread of the update
//               stream (offload/update_stream.h): what lies on a disk comes
//               with each slice, the rest is used where it lies. For a unit on
//               a device the processor computes, with the bits of the device's
//               kernels, and the working copy goes to the device piece by piece
//               while the next slices are computed.
//
// A step by StepSlices may be early (speculative): it is made while a backward
// goes on, with an assumed factor (optim/early_steps.h). It leaves the gradient
// as it is, and new values lie beside the old ones (TieredBuffer::next) until
// they are known to be right.
//
// Source: ZeRO-Offload (arXiv 2101.06840), DeepSpeed's offload_optimizer with
// device cpu.
#ifndef OPTIM_APPLY_STEP_H_
#define OPTIM_APPLY_STEP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "base/stream/stream_point.h"
#include "offload/update_stream.h"
#include "optim/unit_step.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Steps all owned elements of the unit with `gradient`, and returns whether the
// working shard was written, too. A direction or a descent (StepPhase) loads
// only the states that it reads. `*changed` is set before the first change.
// REQUIRES: FlatParameter::PrepareUpdate. LOCAL, ASYNC on devices. Errors are
// those of offloaded states; throws as UnitStep::Apply.
absl::StatusOr<bool> StepHere(FlatParameter* flat, const UnitStep& step,
                              const at::Tensor& gradient,
                              UnitStep::Counts* counts, bool* changed);

// HostFactor: the device's decision on its way to the host, one for all units
// of a step.
class HostFactor {
 public:
  explicit HostFactor(const GradientFactor& factor);
  struct Value {
    double factor = 1;
    bool skip = false;  // there is no step
  };
  // Returns the decision. Blocking.
  Value Wait() const;

 private:
  Value value_;
  at::Tensor scalars_;  // on the host; undefined: value_ is it
  StreamPoint arrived_;
};

// An early step of a unit on a device; the step that follows takes its values
// if the device has decided as was assumed.
struct EarlyHost {
  double factor = 1;  // that was assumed
  bool made = false;  // all of it
  // Counts the early steps that turn out to be right.
  std::atomic<int64_t>* taken = nullptr;
};

// New values go to the device in pieces of at least so many elements; only the
// last piece of a unit may be smaller.
inline constexpr int64_t kLeastUploadNumel = 8 << 20;

struct SliceStepOptions {
  // The step is for UpdateStream::PushEarly. REQUIRES: offloaded states that
  // are written have room for new values.
  bool early = false;
  // The gradient where it is in memory, [owned], and the memory that it keeps
  // until the step is made. Undefined: it is the states' kGradient.
  at::Tensor gradient;
  std::shared_ptr<const FlatBuffer> gradient_memory;
  // Where an early step leaves the new values of what is in memory: masters, or
  // the working shard where these are on the disk.
  std::shared_ptr<const FlatBuffer> next;
  // The rest is for units on a device:
  std::optional<HostFactor> factor;
  // Where the working copy is written, [owned]; undefined where that stays on
  // the host. The writes are ordered after the work so far on this thread's
  // current stream of the device.
  at::Tensor on_device;
  // The early step itself or, for the step that follows it, that early step; or
  // null.
  std::shared_ptr<EarlyHost> host;
};

// Makes the update for the stream. REQUIRES: nobody else uses [owned] of any
// state until the update has ended; `flat` outlives it. Moments, masters, the
// working shard and the gradient are streamed in this order. LOCAL.
StreamedUpdate StepSlices(FlatParameter* flat, const UnitStep& step,
                          SliceStepOptions options);

}  // namespace tessera
#endif  // OPTIM_APPLY_STEP_H_
