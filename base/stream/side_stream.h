// Gives each thread streams of a device for copies beside its kernels.
//
//   SideStream       for copies to the device, which kernels wait for, and for
//                    activations, which leave in forward
//   HostBoundStream  for gradients, which leave in backward as soon as kernels
//                    have made them: what comes to the device for the next
//                    kernels must not wait behind them
#ifndef BASE_STREAM_SIDE_STREAM_H_
#define BASE_STREAM_SIDE_STREAM_H_

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace tessera {

// Return this thread's own streams of `device`, two of libtorch's pool. A
// thread keeps one of each: asking for another device replaces it. LOCAL.
c10::Stream SideStream(c10::Device device);
c10::Stream HostBoundStream(c10::Device device);

}  // namespace tessera
#endif  // BASE_STREAM_SIDE_STREAM_H_
