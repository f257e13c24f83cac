// SavedVersion: a tensor's version counter, and where it stood: whether the
// tensor was written since.
#ifndef BASE_TORCH_SAVED_VERSION_H_
#define BASE_TORCH_SAVED_VERSION_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"

namespace tessera {

class SavedVersion {
 public:
  // Holds no tensor, and is never changed.
  SavedVersion() = default;
  // An inference tensor has no versions: never changed.
  explicit SavedVersion(const at::Tensor& tensor);

  bool changed() const { return now() != saved_; }
  int64_t now() const {
    return counter_.enabled() ? counter_.current_version() : 0;
  }
  int64_t saved() const { return saved_; }
  const c10::VariableVersion& counter() const { return counter_; }

  // libtorch's message of a saved tensor that was changed between forward and
  // backward, which users search for. The tensor is described by its type and
  // `sizes`.
  std::string Error(const std::string& type, at::IntArrayRef sizes) const;
  std::string Error(const at::Tensor& tensor) const {
    return Error(tensor.toString(), tensor.sizes());
  }

 private:
  c10::VariableVersion counter_;
  int64_t saved_ = 0;
};

}  // namespace tessera
#endif  // BASE_TORCH_SAVED_VERSION_H_
