#include "base/torch/version_error.h"

#include <sstream>

#include "torch/csrc/autograd/anomaly_mode.h"

namespace tessera {

std::string VersionError(const std::string& type, at::IntArrayRef sizes,
                         int64_t saved, int64_t now) {
  std::ostringstream out;
  out << "one of the variables needed for gradient computation has been "
         "modified by an inplace operation: ["
      << type << " " << sizes << "] is at version " << now
      << "; expected version " << saved << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled()) {
    out << " Hint: the backtrace further above shows the operation that failed "
           "to compute its gradient. The variable in question was changed in "
           "there or anywhere later. Good luck!";
  } else {
    out << " Hint: enable anomaly detection to find the operation that failed "
           "to compute its gradient, with "
           "torch.autograd.set_detect_anomaly(True, check_nan=False).";
  }
  return out.str();
}

}  // namespace tessera
