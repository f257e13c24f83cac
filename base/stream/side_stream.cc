#include "base/stream/side_stream.h"

#include <optional>

#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {

c10::Stream SideStream(c10::Device device) {
  static thread_local std::optional<c10::Stream> stream;
  if (!stream.has_value() || stream->device() != device) {
    stream = c10::impl::VirtualGuardImpl(device.type())
                 .getStreamFromGlobalPool(device);
  }
  return *stream;
}

}  // namespace tessera
