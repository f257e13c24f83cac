// Writes tensors as a safetensors file, in one process that has them whole. For
// tests: programs use Engine::SaveSafetensors.
#ifndef CHECKPOINT_WRITE_SAFETENSORS_TEST_UTIL_H_
#define CHECKPOINT_WRITE_SAFETENSORS_TEST_UTIL_H_

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

// Writes larger dtypes first and then by name, so that each tensor is aligned,
// and the same tensors give the same bytes. REQUIRES: each dtype is one of the
// format's.
absl::Status WriteSafetensors(
    const std::string& path,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace tessera
#endif  // CHECKPOINT_WRITE_SAFETENSORS_TEST_UTIL_H_
