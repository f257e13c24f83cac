// HostStep: the step of a unit that is on a device, while its states are on the
// host or on a disk, as the update stream wants it. The processor computes on
// them, slice by slice, with the bits of the device's kernels; and each slice
// of the working copy goes to the device while the next one is computed.
//
// EarlyHostStep is its first half, made while the backward goes on, by a factor
// that is assumed (optim/sharded_optimizer_early.cc): new values are written
// beside what is there (TieredBuffer::next). HostStep behind it has only to
// exchange the two, if the device has decided so, and to copy.
//
// Source: ZeRO-Offload (arXiv 2101.06840), DeepSpeed's offload_optimizer with
// device cpu.
#ifndef OPTIM_HOST_STEP_H_
#define OPTIM_HOST_STEP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "base/stream/stream_point.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"
#include "optim/unit_step.h"

namespace tessera {

// What the device decides, on its way to the host: one for all units of a step.
class HostFactor {
 public:
  explicit HostFactor(const GradientFactor& factor);
  struct Value {
    double factor = 1;
    bool skip = false;  // there is no step
  };
  // Blocking.
  Value Wait() const;

 private:
  Value value_;
  at::Tensor scalars_;  // on the host; undefined: value_ is it
  StreamPoint arrived_;
};

// [owned] each, and left alone by others until the update has ended.
struct HostStates {
  // On the host, or on a disk.
  TieredBuffer* masters = nullptr;
  std::vector<TieredBuffer*> moments;  // the optimizer's states
  // On the host.
  TieredBuffer* gradient = nullptr;
  // The same, of the working dtype; null where masters on the host are it.
  TieredBuffer* working = nullptr;
};

// Of an early step, for the step behind it.
struct EarlyHost {
  double factor = 1;  // that was assumed
  bool made = false;  // all of it
  // How many turn out to be the right ones is added to it.
  std::atomic<int64_t>* taken = nullptr;
};

// `on_device`: what becomes of the working copy, [owned]; undefined where it
// stays on the host. Comes after what this thread's current stream of the
// device has been given. `early`: behind that EarlyHostStep; or null.
StreamedUpdate HostStep(const UnitStep& step, const HostFactor& factor,
                        const HostStates& states, at::Device device,
                        at::Tensor on_device,
                        std::shared_ptr<const EarlyHost> early);

// Leaves the gradient as it is, and writes what has room for that to `next`: a
// working copy without is one of which nothing is read any more. REQUIRES: all
// of it is on the host, and the states have that room; the factor is a number.
// `early`: what it sets, not null.
StreamedUpdate EarlyHostStep(const UnitStep& step, const HostStates& states,
                             std::shared_ptr<EarlyHost> early);

}  // namespace tessera
#endif  // OPTIM_HOST_STEP_H_
