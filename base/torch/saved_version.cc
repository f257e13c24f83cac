#include "base/torch/saved_version.h"

#include <sstream>

#include "torch/csrc/autograd/anomaly_mode.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

SavedVersion::SavedVersion(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  counter_ = torch::autograd::impl::version_counter(tensor);
  saved_ = now();
}

std::string SavedVersion::Error(const std::string& type,
                                at::IntArrayRef sizes) const {
  std::ostringstream out;
  out << "one of the variables needed for gradient computation has been "
         "modified by an inplace operation: ["
      << type << " " << sizes << "] is at version " << now()
      << "; expected version " << saved_ << " instead.";
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
