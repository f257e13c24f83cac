#include "base/torch/grad_access.h"

#include <memory>
#include <typeinfo>
#include <utility>

#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

class CountingMeta : public autograd::AutogradMeta {
 public:
  // Takes all contents of `other`.
  explicit CountingMeta(autograd::AutogradMeta* other) {
    name_ = std::move(other->name_);
    grad_ = std::move(other->grad_);
    grad_fn_ = std::move(other->grad_fn_);
    grad_accumulator_ = std::move(other->grad_accumulator_);
    fw_grad_ = std::move(other->fw_grad_);
    hooks_ = std::move(other->hooks_);
    cpp_hooks_list_ = std::move(other->cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(other->post_acc_grad_hooks_);
    requires_grad_ = other->requires_grad_;
    retains_grad_ = other->retains_grad_;
    is_view_ = other->is_view_;
    output_nr_ = other->output_nr_;
    grad_dtype_ = other->grad_dtype_;
    allow_grad_dtype_mismatch_ = other->allow_grad_dtype_mismatch_;
  }
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
  if (typeid(*meta) != typeid(autograd::AutogradMeta)) return nullptr;
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
