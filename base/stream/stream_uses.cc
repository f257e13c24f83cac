#include "base/stream/stream_uses.h"

#include <algorithm>

#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {
namespace {

c10::impl::VirtualGuardImpl ImplOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

c10::Stream Current(c10::Device device) {
  return ImplOf(device).getStream(device);
}

// Orders `second` after what `first` has been given.
void Order(c10::Stream first, c10::Stream second) {
  if (first == second) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(second);
}

}  // namespace

void StreamUses::SetReady() {
  if (device_.is_cpu()) return;
  ready_ = StreamPoint::Now(device_);
  streams_ = {Current(device_)};
}

void StreamUses::Use() {
  if (device_.is_cpu()) return;
  const c10::Stream current = Current(device_);
  if (std::find(streams_.begin(), streams_.end(), current) != streams_.end()) {
    return;
  }
  ready_.Order();
  streams_.push_back(current);
}

void StreamUses::OrderAfter() const {
  if (device_.is_cpu()) return;
  const c10::Stream current = Current(device_);
  for (const c10::Stream& stream : streams_) Order(stream, current);
}

void StreamUses::Keep(const at::Tensor& memory) const {
  if (device_.is_cpu() || !memory.defined()) return;
  for (const c10::Stream& stream : streams_) {
    ImplOf(device_).recordDataPtrOnStream(memory.storage().data_ptr(), stream);
  }
}

void StreamChain::Enter() {
  if (device_.is_cpu()) return;
  const c10::Stream current = Current(device_);
  if (last_.has_value()) Order(*last_, current);
  last_ = current;
}

void KeepForCurrentStream(const at::Tensor& memory) {
  const c10::Device device = memory.device();
  if (device.is_cpu() || device.is_meta()) return;
  ImplOf(device).recordDataPtrOnStream(memory.storage().data_ptr(),
                                       Current(device));
}

}  // namespace tessera
