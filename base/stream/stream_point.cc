#include "base/stream/stream_point.h"

#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {

StreamPoint StreamPoint::Now(c10::Device device) {
  StreamPoint point;
  if (device.is_cpu()) return point;
  const c10::impl::VirtualGuardImpl impl(device.type());
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(impl.getStream(device));
  point.event_ = std::move(event);
  return point;
}

void StreamPoint::Order() const {
  if (event_ == nullptr) return;
  const c10::impl::VirtualGuardImpl impl(event_->device_type());
  event_->block(impl.getStream(event_->device()));
}

void StreamPoint::Wait() const {
  if (event_ == nullptr || event_->query()) return;
  event_->synchronize();
}

}  // namespace tessera
