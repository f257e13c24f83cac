#include "verify/oracle_module.h"

#include <torch/torch.h>

#include <algorithm>

namespace tessera {
namespace {

bool IsNorm(torch::nn::Module& module) {
  namespace nn = torch::nn;
  return module.as<nn::LayerNorm>() != nullptr ||
         module.as<nn::GroupNorm>() != nullptr ||
         module.as<nn::BatchNorm1d>() != nullptr ||
         module.as<nn::BatchNorm2d>() != nullptr ||
         module.as<nn::BatchNorm3d>() != nullptr ||
         module.as<nn::InstanceNorm1d>() != nullptr ||
         module.as<nn::InstanceNorm2d>() != nullptr ||
         module.as<nn::InstanceNorm3d>() != nullptr;
}

// Converts a tensor in place: it stays the same tensor at the same place in its
// storage.
void Convert(at::Tensor* t, at::ScalarType dtype) {
  if (!t->defined() || !t->is_floating_point()) return;
  if (t->scalar_type() == dtype) return;
  const auto numel =
      static_cast<int64_t>(t->storage().nbytes() / t->element_size());
  at::Tensor converted =
      torch::zeros({numel}, t->options().dtype(dtype).requires_grad(false))
          .as_strided(t->sizes(), t->strides(), t->storage_offset());
  converted.copy_(*t);
  t->set_data(converted);
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> DistinctParameters(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> distinct;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& t = entry.value();
    if (t.numel() == 0) continue;
    if (std::any_of(distinct.begin(), distinct.end(),
                    [&](const auto& p) { return p.second.is_same(t); })) {
      continue;
    }
    distinct.emplace_back(entry.key(), t);
  }
  return distinct;
}

void ConvertModule(torch::nn::Module& module,
                   std::optional<at::ScalarType> dtype, bool keep_norms,
                   std::optional<at::ScalarType> buffer_dtype) {
  torch::NoGradGuard no_grad;
  for (const auto& m : module.modules()) {
    if (dtype && !(keep_norms && IsNorm(*m))) {
      for (at::Tensor& p : m->parameters(/*recurse=*/false)) {
        Convert(&p, *dtype);
      }
    }
    if (!buffer_dtype) continue;
    for (at::Tensor& b : m->buffers(/*recurse=*/false)) {
      Convert(&b, *buffer_dtype);
    }
  }
}

}  // namespace tessera
