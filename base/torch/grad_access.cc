#include "base/torch/grad_access.h"

#include <memory>
#include <typeinfo>
#include <utility>

#include "base/torch/moved_autograd_meta.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

class CountingMeta : public MovedAutogradMeta {
 public:
  using MovedAutogradMeta::MovedAutogradMeta;

  at::Tensor& mutable_grad() override {
    accesses.changes.fetch_add(1, std::memory_order_relaxed);
    return grad_;
  }
  const at::Tensor& grad() const override {
    if (!grad_.defined()) {
      accesses.looks.fetch_add(1, std::memory_order_relaxed);
    }
    return grad_;
  }
  GradAccesses accesses;
};

}  // namespace

GradAccesses* CountGradAccesses(const at::Tensor& tensor) {
  autograd::AutogradMeta* const meta =
      autograd::impl::materialize_autograd_meta(tensor);
  if (auto* counting = dynamic_cast<CountingMeta*>(meta)) {
    return &counting->accesses;
  }
  // One of ours is left by an engine that is closed, and does nothing more.
  if (typeid(*meta) != typeid(autograd::AutogradMeta) &&
      dynamic_cast<MovedAutogradMeta*>(meta) == nullptr) {
    return nullptr;
  }
  auto counting = std::make_unique<CountingMeta>(meta);
  GradAccesses* const accesses = &counting->accesses;
  tensor.unsafeGetTensorImpl()->set_autograd_meta(std::move(counting));
  return accesses;
}

at::Tensor PeekGrad(const at::Tensor& tensor) {
  const auto* const meta = autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr ? at::Tensor() : meta->grad_;
}

}  // namespace tessera
