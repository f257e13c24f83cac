// MadeOnDevice: modules that are constructed in its scope have their parameters
// on a device from the start, and draw their initial values there. In C++
// torch::empty has no default device, so a module draws them on the CPU, with
// one thread: some 8 s for 1 B parameters.
//
// Threads: a scope belongs to its thread. Scopes do not nest.
#ifndef BENCHMARKS_GPT_MADE_ON_DEVICE_H_
#define BENCHMARKS_GPT_MADE_ON_DEVICE_H_

#include "c10/core/Device.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {

class MadeOnDevice {
 public:
  explicit MadeOnDevice(c10::Device device);

 private:
  const c10::impl::IncludeDispatchKeyGuard mode_;
};

}  // namespace tessera
#endif  // BENCHMARKS_GPT_MADE_ON_DEVICE_H_
