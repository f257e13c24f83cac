// Tensors written as a safetensors file, by one process that has them whole.
// For tests: programs write them with Engine::SaveSafetensors.
#ifndef CHECKPOINT_WRITE_SAFETENSORS_H_
#define CHECKPOINT_WRITE_SAFETENSORS_H_

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

// Larger dtypes first and then by name, so that each is aligned, and the same
// tensors give the same bytes. REQUIRES: each has a dtype of the format.
absl::Status WriteSafetensors(
    const std::string& path,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace tessera
#endif  // CHECKPOINT_WRITE_SAFETENSORS_H_
