// Gives each thread a stream of a device for copies that must not wait for
// kernels.
#ifndef BASE_STREAM_SIDE_STREAM_H_
#define BASE_STREAM_SIDE_STREAM_H_

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace tessera {

// Returns this thread's own stream of `device`, one of libtorch's pool. A
// thread keeps one such stream: asking for another device replaces it. LOCAL.
c10::Stream SideStream(c10::Device device);

}  // namespace tessera
#endif  // BASE_STREAM_SIDE_STREAM_H_
