// A stream of a device for copies that are to wait for no maths.
#ifndef BASE_STREAM_SIDE_STREAM_H_
#define BASE_STREAM_SIDE_STREAM_H_

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace tessera {

// This thread's own, of the last device that it asked for: one of libtorch's
// pool. LOCAL.
c10::Stream SideStream(c10::Device device);

}  // namespace tessera
#endif  // BASE_STREAM_SIDE_STREAM_H_
