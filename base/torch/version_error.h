// The error of a saved tensor that was changed between forward and backward.
#ifndef BASE_TORCH_VERSION_ERROR_H_
#define BASE_TORCH_VERSION_ERROR_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"

namespace tessera {

// libtorch's message, which users search for. `tensor` is described by its type
// and `sizes`; `saved` and `now` are its versions.
std::string VersionError(const std::string& type, at::IntArrayRef sizes,
                         int64_t saved, int64_t now);

}  // namespace tessera
#endif  // BASE_TORCH_VERSION_ERROR_H_
