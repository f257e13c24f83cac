// ConvertedBuffers: a module's buffers in another dtype, from Engine::Create to
// Close (data_types.buffer_dtype).
#ifndef ENGINE_BUILD_CONVERTED_BUFFERS_H_
#define ENGINE_BUILD_CONVERTED_BUFFERS_H_

#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class ConvertedBuffers {
 public:
  // Converts the buffers of floating dtypes to `dtype`; absent: none. LOCAL.
  absl::Status Convert(const torch::nn::Module& module,
                       std::optional<at::ScalarType> dtype);
  // Converts them back to the dtypes that they had. LOCAL. Throws what a copy
  // throws.
  void GiveBack();

 private:
  std::vector<std::pair<at::Tensor, at::ScalarType>> converted_;
};

}  // namespace tessera
#endif  // ENGINE_BUILD_CONVERTED_BUFFERS_H_
