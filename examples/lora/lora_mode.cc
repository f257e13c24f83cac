// The mode that adds adapters' parts to the results of operators (Note [How the
// class stays as it is] in lora.h), and Lora::Scope, which enters it.
#include <optional>
#include <utility>

#include "ATen/Functions.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "examples/lora/lora.h"
#include "torch/library.h"

namespace {

namespace nn = torch::nn;

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

// What must be added to the result of an operator with a weight of this
// storage.
struct Part {
  const nn::LinearImpl* a;
  const nn::LinearImpl* b;
  double scale;
};
using Parts = std::unordered_map<const c10::StorageImpl*, Part>;
thread_local const Parts* current = nullptr;

// Returns the adapter's part of x matmul W^T; an undefined tensor if there is
// none.
at::Tensor Added(const at::Tensor& x, const at::Tensor& weight_t) {
  if (current == nullptr || weight_t.dim() != 2) return {};
  const auto found = current->find(
      weight_t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (found == current->end()) return {};
  const auto& [a, b, scale] = found->second;
  if (weight_t.size(0) != a->weight.size(1) ||
      weight_t.size(1) != b->weight.size(0)) {
    return {};  // not transposed: not the forward of a Linear
  }
  return at::linear(at::linear(x, a->weight), b->weight) * scale;
}

at::Tensor Matmul(const at::Tensor& x, const at::Tensor& weight_t) {
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  const at::Tensor y = at::matmul(x, weight_t);
  const at::Tensor added = Added(x, weight_t);
  return added.defined() ? y + added : y;
}

// Python's nn.Linear, and models in C++ that call it. It is taken here, above
// an engine: the operators within it would use the adapter where an engine does
// not look for parameters.
at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  const at::Tensor y = at::linear(x, weight, bias);
  const at::Tensor added = Added(x, weight.t());
  return added.defined() ? y + added : y;
}

at::Tensor Addmm(const at::Tensor& bias, const at::Tensor& x,
                 const at::Tensor& weight_t, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  const at::Tensor y = at::addmm(bias, x, weight_t, beta, alpha);
  const at::Tensor added = Added(x, weight_t);
  return added.defined() ? y + added : y;
}

// All other operators pass through.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("linear", &Linear);
  m.impl("matmul", &Matmul);
  m.impl("addmm", &Addmm);
}

}  // namespace

struct Lora::Scope::State {
  Parts parts;
  const Parts* outer;
  c10::impl::IncludeDispatchKeyGuard mode{kMode};
};

// Weights are looked up anew, since Engine::Create may have given them other
// storages (in another dtype, on another device).
Lora::Scope::Scope(const Lora& lora) : state_(std::make_unique<State>()) {
  for (const Layer& layer : lora.layers_) {
    const auto* const storage = layer.base->weight.unsafeGetTensorImpl()
                                    ->unsafe_storage()
                                    .unsafeGetStorageImpl();
    state_->parts[storage] = {layer.a.get(), layer.b.get(), lora.scale()};
  }
  state_->outer = std::exchange(current, &state_->parts);
}

Lora::Scope::~Scope() { current = state_->outer; }
