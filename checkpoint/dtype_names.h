// Maps libtorch's dtypes to their names in safetensors and checkpoints.
#ifndef CHECKPOINT_DTYPE_NAMES_H_
#define CHECKPOINT_DTYPE_NAMES_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Returns "F32" and so on; "" where safetensors have no such dtype.
std::string NameOfDtype(at::ScalarType dtype);
// Returns the dtype of that name; Undefined where libtorch has none.
at::ScalarType DtypeNamed(absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_DTYPE_NAMES_H_
