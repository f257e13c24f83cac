#include "base/stream/side_stream.h"

#include <optional>

#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {
namespace {

c10::Stream Kept(std::optional<c10::Stream>* stream, c10::Device device) {
  if (!stream->has_value() || (*stream)->device() != device) {
    *stream = c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device);
  }
  return **stream;
}

}  // namespace

c10::Stream SideStream(c10::Device device) {
  static thread_local std::optional<c10::Stream> stream;
  return Kept(&stream, device);
}

c10::Stream HostBoundStream(c10::Device device) {
  static thread_local std::optional<c10::Stream> stream;
  return Kept(&stream, device);
}

}  // namespace tessera
