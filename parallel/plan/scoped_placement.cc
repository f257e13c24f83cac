#include "parallel/plan/scoped_placement.h"

#include <string>
#include <utility>

#include "base/above/above_autograd.h"
#include "c10/core/TensorImpl.h"
#include "parallel/tensor/placed.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

// TensorImpl's key set is protected, and nothing public sets one key of it.
struct PlacedKeys : c10::TensorImpl {
  static c10::DispatchKeySet& Of(c10::TensorImpl* impl) {
    return impl->*(&PlacedKeys::key_set_);
  }
};

// Takes gradients of the parameter, of a user's function, to the part.
class ToPartOfParameter final : public torch::autograd::Node {
 public:
  ToPartOfParameter(const TensorPlacement& placement,
                    std::shared_ptr<PartGroup> group)
      : placement_(placement), group_(std::move(group)) {}
  std::string name() const override { return "ToPartOfParameter"; }

 private:
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return std::move(gradients);
    return {PartAs(gradients[0], placement_, group_)};
  }

  const TensorPlacement placement_;
  const std::shared_ptr<PartGroup> group_;
};

}  // namespace

ScopedPlacement::ScopedPlacement(at::Tensor parameter, at::Tensor part,
                                 const TensorPlacement& placement,
                                 std::shared_ptr<PartGroup> group)
    : parameter_(std::move(parameter)) {
  c10::TensorImpl* const impl = parameter_.unsafeGetTensorImpl();
  auto placed =
      c10::make_intrusive<Placed>(std::move(part), placement, std::move(group));
  if (placed->part.requires_grad()) {
    placed->accumulator =
        std::make_shared<ToPartOfParameter>(placement, placed->group);
    placed->accumulator->add_next_edge(
        torch::autograd::impl::gradient_edge(placed->part));
    placed->accumulator->add_input_metadata(parameter_);
    torch::autograd::impl::set_grad_accumulator(parameter_,
                                                placed->accumulator);
  }
  impl->set_backend_meta(std::move(placed));
  PlacedKeys::Of(impl) = PlacedKeys::Of(impl).add(kAboveKey);
}

ScopedPlacement::~ScopedPlacement() {
  c10::TensorImpl* const impl = parameter_.unsafeGetTensorImpl();
  PlacedKeys::Of(impl) = PlacedKeys::Of(impl).remove(kAboveKey);
  impl->set_backend_meta(nullptr);
  torch::autograd::impl::set_grad_accumulator(parameter_, {});
}

}  // namespace tessera
