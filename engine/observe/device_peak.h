// Peak performance of devices, for utilization.
#ifndef ENGINE_OBSERVE_DEVICE_PEAK_H_
#define ENGINE_OBSERVE_DEVICE_PEAK_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the operations per second of dense 16-bit matrix products, by the
// vendors' data sheets, for a device called `model` ("NVIDIA H100 80GB HBM3");
// 0 if it is not known.
double PeakFlopsOf(absl::string_view model);
// Returns the model of this host's first GPU, as the driver says; "" without
// one.
std::string GpuModel();

}  // namespace tessera
#endif  // ENGINE_OBSERVE_DEVICE_PEAK_H_
