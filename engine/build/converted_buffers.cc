#include "engine/build/converted_buffers.h"

#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "torch/nn/module.h"

namespace tessera {

absl::Status ConvertedBuffers::Convert(const torch::nn::Module& module,
                                       std::optional<at::ScalarType> dtype) {
  if (!dtype.has_value()) return absl::OkStatus();
  return CatchTorch("buffer_dtype", [&] {
    TorchScope scope;
    for (const auto& buffer : module.named_buffers(/*recurse=*/true)) {
      const at::Tensor& t = buffer.value();
      if (!t.defined() || !c10::isFloatingType(t.scalar_type())) continue;
      if (t.scalar_type() == *dtype) continue;  // or tied
      converted_.emplace_back(t, t.scalar_type());
      t.set_data(t.to(*dtype));
    }
  });
}

void ConvertedBuffers::GiveBack() {
  TorchScope scope;
  for (const auto& [buffer, dtype] : converted_) {
    buffer.set_data(buffer.to(dtype));
  }
  converted_.clear();
}

}  // namespace tessera
