// Methods of tensors that are no operators: libtorch calls them through its
// VariableHooksInterface, of which a process has one. Ours stands before
// libtorch's, and goes on with the part where a tensor is placed.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "ATen/core/VariableHooksInterface.h"
#include "base/torch_guard.h"
#include "parallel/tensor/gradients.h"
#include "parallel/tensor/placed.h"

namespace tessera {
namespace {

using at::TensorBase;
using Hook = std::function<TensorBase(const TensorBase&)>;

// Hands everything on.
class VariablesOfLibtorch : public at::impl::VariableHooksInterface {
 public:
  explicit VariablesOfLibtorch(VariableHooksInterface* next) : next_(*next) {}

  TensorBase tensor_data(const TensorBase& t) const override {
    return next_.tensor_data(t);
  }
  TensorBase variable_data(const TensorBase& t) const override {
    return next_.variable_data(t);
  }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(
      const TensorBase& t) const override {
    return next_.grad_fn(t);
  }
  unsigned _register_hook(const TensorBase& t, Hook hook) const override {
    return next_._register_hook(t, std::move(hook));
  }
  void remove_hook(const TensorBase& t, unsigned position) const override {
    next_.remove_hook(t, position);
  }
  bool is_view(const TensorBase& t) const override { return next_.is_view(t); }
  const TensorBase& base(const TensorBase& t) const override {
    return next_.base(t);
  }
  const std::string& name(const TensorBase& t) const override {
    return next_.name(t);
  }
  bool is_leaf(const TensorBase& t) const override { return next_.is_leaf(t); }
  int64_t output_nr(const TensorBase& t) const override {
    return next_.output_nr(t);
  }
  void set_data(const TensorBase& t, const TensorBase& data) const override {
    next_.set_data(t, data);
  }
  TensorBase data(const TensorBase& t) const override { return next_.data(t); }
  int64_t _version(const TensorBase& t) const override {
    return next_._version(t);
  }
  void retain_grad(const TensorBase& t) const override { next_.retain_grad(t); }
  bool retains_grad(const TensorBase& t) const override {
    return next_.retains_grad(t);
  }
  void _backward(const at::Tensor& t, at::TensorList inputs,
                 const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph,
                 bool create_graph) const override {
    next_._backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& t, bool value) const override {
    next_.requires_grad_(t, value);
  }
  void basic_autograd_not_implemented_fallback(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack* stack) const override {
    next_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<at::ScalarType> grad_dtype(const TensorBase& t) const override {
    return next_.grad_dtype(t);
  }
  void set_grad_dtype(
      const TensorBase& t,
      const std::optional<at::ScalarType>& dtype) const override {
    next_.set_grad_dtype(t, dtype);
  }

 protected:
  const VariableHooksInterface& next() const { return next_; }

 private:
  const VariableHooksInterface& next_;  // lives as long as the process
};

class PlacedVariables final : public VariablesOfLibtorch {
 public:
  using VariablesOfLibtorch::VariablesOfLibtorch;

  unsigned _register_hook(const TensorBase& t, Hook hook) const override {
    const Placed* const placed = PlacedForHooks(t);
    if (placed == nullptr) return next()._register_hook(t, std::move(hook));
    return next()._register_hook(
        placed->part,
        [hook = std::move(hook), placement = placed->placement,
         group = placed->group](const TensorBase& gradient) -> TensorBase {
          const at::Tensor result(
              hook(PlacedGradient(at::Tensor(gradient), placement, group)));
          return PartOfGradient(result, placement, group);
        });
  }
  void remove_hook(const TensorBase& t, unsigned position) const override {
    const Placed* const placed = PlacedForHooks(t);
    next().remove_hook(placed == nullptr ? t : placed->part, position);
  }

  void retain_grad(const TensorBase& t) const override {
    const at::Tensor tensor(t);
    const Placed* const placed = PlacedOf(tensor);
    if (placed == nullptr || !GoesOnByPart(tensor)) {
      return next().retain_grad(t);
    }
    next().retain_grad(placed->part);
    MirrorGradient(tensor);
  }
  bool retains_grad(const TensorBase& t) const override {
    const at::Tensor tensor(t);
    const Placed* const placed = PlacedOf(tensor);
    return next().retains_grad(
        placed != nullptr && GoesOnByPart(tensor) ? placed->part : t);
  }

  void requires_grad_(const TensorBase& t, bool value) const override {
    next().requires_grad_(t, value);
    const at::Tensor tensor(t);
    Placed* const placed = PlacedOf(tensor);
    if (placed == nullptr || !next().is_leaf(t) ||
        placed->part.requires_grad() == value) {
      return;
    }
    if (!placed->part.is_leaf()) placed->part = placed->part.detach();
    next().requires_grad_(placed->part, value);
    ConnectLeaf(tensor);
  }

  // Replaces the data of the part, which keeps its gradient, hooks and version.
  void set_data(const TensorBase& t, const TensorBase& data) const override {
    const at::Tensor tensor(t), source(data);
    const Placed* const placed = PlacedOf(tensor);
    const Placed* const from = PlacedOf(source);
    if (placed == nullptr && from == nullptr) return next().set_data(t, data);
    if (placed != nullptr && from == nullptr &&
        placed->placement.kind == TensorPlacement::kCopy) {
      set_data(t, Place(source, placed->placement, placed->group));
      return;
    }
    if (placed == nullptr || from == nullptr ||
        !(placed->placement == from->placement) ||
        placed->group != from->group) {
      ThrowIfError(absl::FailedPreconditionError(
          "set_data() needs two tensors that are divided among ranks alike, or "
          "none that is: write the values by copy_() under "
          "torch::NoGradGuard"));
    }
    if (!placed->part.is_same(from->part)) {
      placed->part.set_data(from->part.detach());
    }
    c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    auto meta = impl->get_backend_meta_intrusive_ptr();
    impl->shallow_copy_from(
        Place(placed->part.detach(), placed->placement, placed->group)
            .getIntrusivePtr());
    impl->set_backend_meta(std::move(meta));
    if (next().is_leaf(t)) ConnectLeaf(tensor);
  }

 private:
  // Returns what `t` is where its part has its hooks; null: it has them itself.
  static const Placed* PlacedForHooks(const TensorBase& t) {
    const at::Tensor tensor(t);
    const Placed* const placed = PlacedOf(tensor);
    if (placed == nullptr || !GoesOnByPart(tensor)) return nullptr;
    // A function of the user's made it, and has its hooks already.
    const auto* const meta = torch::autograd::impl::get_autograd_meta(t);
    return meta->cpp_hooks_list_ == nullptr ? placed : nullptr;
  }
};

[[maybe_unused]] const bool installed = [] {
  at::impl::SetVariableHooks(new PlacedVariables(at::impl::GetVariableHooks()));
  return true;
}();

}  // namespace
}  // namespace tessera
