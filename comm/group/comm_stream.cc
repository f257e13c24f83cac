#include "comm/group/comm_stream.h"

#include <map>
#include <tuple>

#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {
namespace {

// This thread's, one for each lane of a device, for as long as the thread
// lives. Of high priority: computing waits for what is communicated, seldom the
// other way.
c10::Stream CommStreamOf(c10::Device device, int lane) {
  using Key = std::tuple<c10::DeviceType, int, int>;
  thread_local std::map<Key, c10::Stream> streams;
  const Key key(device.type(), device.index(), lane);
  const auto known = streams.find(key);
  if (known != streams.end()) return known->second;
  const c10::impl::VirtualGuardImpl impl(device.type());
  // For good: what is done outside of a scope, such as to destroy an event,
  // would make a context on the first device.
  impl.setDevice(device);
  const c10::Stream made =
      impl.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  streams.emplace(key, made);
  return made;
}

}  // namespace

OnCommStream::OnCommStream(c10::Device device, const StreamPoint& after,
                           int lane)
    : device_(device) {
  if (device.is_cpu()) return;
  guard_.emplace(CommStreamOf(device, lane));
  after.Order();
}

}  // namespace tessera
