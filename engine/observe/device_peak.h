// What devices compute at most, for utilization.
#ifndef ENGINE_OBSERVE_DEVICE_PEAK_H_
#define ENGINE_OBSERVE_DEVICE_PEAK_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Operations a second of dense matrix products in 16 bits, by the makers' data
// sheets, of a device whose name has `model` in it ("NVIDIA H100 80GB HBM3"); 0
// of others.
double PeakFlopsOf(absl::string_view model);
// The model of this host's first GPU, as the driver says; "" without one.
std::string GpuModel();

}  // namespace tessera
#endif  // ENGINE_OBSERVE_DEVICE_PEAK_H_
