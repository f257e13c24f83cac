// What safetensors and checkpoints call libtorch's dtypes.
#ifndef CHECKPOINT_DTYPE_NAMES_H_
#define CHECKPOINT_DTYPE_NAMES_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// "F32"; "" where safetensors have no such dtype.
std::string NameOfDtype(at::ScalarType dtype);
// Undefined where libtorch has no such dtype.
at::ScalarType DtypeNamed(absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_DTYPE_NAMES_H_
