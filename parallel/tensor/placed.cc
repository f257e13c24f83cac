// Autograd runs on parts, so a placed tensor needs no history for the operators
// that dispatch.cc computes. It has one for others' code that reads it: a
// torch::autograd::Function connects its node to the tensors that it is given,
// and would cut the graph in silence if they had none. So there are two nodes:
//
//   part -> ToPlaced -> placed tensor -> a user's Function -> placed tensor
//                                                  -> ToPart -> part
//
// ToPlaced's backward takes the part of a gradient, ToPart's places one.
// Without such a Function neither runs.
#include "parallel/tensor/placed.h"

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr char kNoMemory[] =
    "divided among the ranks, without a pointer: use operators, or "
    "tessera::Whole";

c10::DispatchKeySet KeysOf(const at::Tensor& part) {
  return c10::DispatchKeySet(kAboveKey) |
         c10::DispatchKeySet(part.key_set().highestBackendKey());
}

// Gives what TensorImpl keeps for its subclasses.
class PlacedImpl : public c10::TensorImpl {
 public:
  PlacedImpl(const at::Tensor& part, at::IntArrayRef sizes)
      : TensorImpl(KeysOf(part), part.dtype(), part.device()) {
    set_sizes_contiguous(sizes);
  }

  static void AddKey(c10::TensorImpl* tensor) {
    constexpr auto kKeys = &PlacedImpl::key_set_;
    tensor->*kKeys = (tensor->*kKeys).add(kAboveKey);
  }
};

// This rank's part of a gradient of the whole.
at::Tensor PartOfGradient(const at::Tensor& gradient,
                          const TensorPlacement& placement,
                          const std::shared_ptr<PartGroup>& group) {
  if (!gradient.defined()) return gradient;
  if (placement.kind == TensorPlacement::kWholeView) return Whole(gradient);
  return PartAs(gradient, placement.dim, group);
}

class ToPlaced : public Node {
 public:
  ToPlaced(const at::Tensor& part, TensorPlacement placement,
           std::shared_ptr<PartGroup> group)
      : part_(part.getIntrusivePtr()),
        placement_(placement),
        group_(std::move(group)) {}
  std::string name() const override { return "ToPlaced"; }

  // Throws if the part has another history by now.
  void Check() const {
    const c10::intrusive_ptr<c10::TensorImpl> part = part_.lock();
    if (part == nullptr) return;
    const at::Tensor tensor(part);
    if (torch::autograd::impl::gradient_edge(tensor).function ==
        next_edge(0).function) {
      return;
    }
    ThrowIfError(absl::FailedPreconditionError(
        "a torch::autograd::Function was given a tensor that is divided among "
        "ranks and that was changed in place through a view, or while the "
        "function's result was not used yet: give it a clone() of the tensor"));
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    return {PartOfGradient(gradients[0], placement_, group_)};
  }

  const c10::weak_intrusive_ptr<c10::TensorImpl> part_;
  const TensorPlacement placement_;
  const std::shared_ptr<PartGroup> group_;
};

class ToPart : public Node {
 public:
  ToPart(TensorPlacement placement, std::shared_ptr<PartGroup> group)
      : placement_(placement), group_(std::move(group)) {}
  std::string name() const override { return "ToPart"; }

 private:
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined() ||
        placement_.kind == TensorPlacement::kWholeView) {
      return std::move(gradients);
    }
    return {Place(std::move(gradients[0]), placement_, group_)};
  }

  const TensorPlacement placement_;
  const std::shared_ptr<PartGroup> group_;
};

// Connects `result` to `source` by a node.
void Connect(const at::Tensor& source, const at::Tensor& result,
             const std::shared_ptr<Node>& node) {
  node->add_next_edge(torch::autograd::impl::gradient_edge(source));
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(result), node);
}

}  // namespace

at::Tensor Place(at::Tensor part, TensorPlacement placement,
                 std::shared_ptr<PartGroup> group) {
  std::vector<int64_t> sizes = part.sizes().vec();
  if (placement.kind == TensorPlacement::kShard) {
    TESSERA_CHECK(placement.dim >= 0 && placement.dim < part.dim());
    sizes[static_cast<size_t>(placement.dim)] *= group->size();
  }
  at::Tensor placed = at::detail::make_tensor<PlacedImpl>(part, sizes);
  placed.unsafeGetTensorImpl()
      ->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  placed.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Placed>(
      std::move(part), placement, std::move(group)));
  RenewHistory(placed);
  return placed;
}

void RenewHistory(const at::Tensor& tensor) {
  const Placed& placed = *PlacedOf(tensor);
  if (!at::GradMode::is_enabled() || !placed.part.requires_grad()) return;
  Connect(
      placed.part, tensor,
      std::make_shared<ToPlaced>(placed.part, placed.placement, placed.group));
  const c10::intrusive_ptr<c10::TensorImpl> base = placed.base.lock();
  if (base != nullptr) RenewHistory(at::Tensor(base));
}

void PlaceInPlace(const at::Tensor& parameter, at::Tensor part,
                  TensorPlacement placement, std::shared_ptr<PartGroup> group) {
  c10::TensorImpl* const impl = parameter.unsafeGetTensorImpl();
  PlacedImpl::AddKey(impl);
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  auto placed =
      c10::make_intrusive<Placed>(std::move(part), placement, std::move(group));
  if (placed->part.requires_grad()) {
    // A function of the user's that is given the parameter gets this one.
    placed->accumulator =
        std::make_shared<ToPlaced>(placed->part, placement, placed->group);
    placed->accumulator->add_next_edge(
        torch::autograd::impl::gradient_edge(placed->part));
    placed->accumulator->add_input_metadata(parameter);
    torch::autograd::impl::set_grad_accumulator(parameter, placed->accumulator);
  }
  impl->set_backend_meta(std::move(placed));
}

at::Tensor PartForUse(const at::Tensor& tensor) {
  Placed* const placed = PlacedOf(tensor);
  if (placed == nullptr) return tensor;
  const std::shared_ptr<Node>& node = tensor.grad_fn();
  if (node == nullptr || dynamic_cast<ToPlaced*>(node.get()) != nullptr ||
      !at::GradMode::is_enabled()) {
    return placed->part;
  }
  for (const Edge& edge : node->next_edges()) {
    const auto* const given = dynamic_cast<ToPlaced*>(edge.function.get());
    if (given != nullptr) given->Check();
  }
  at::Tensor part = placed->part.detach();
  Connect(tensor, part,
          std::make_shared<ToPart>(placed->placement, placed->group));
  placed->part = part;
  RenewHistory(tensor);
  return part;
}

at::Tensor Whole(const at::Tensor& tensor) {
  Placed* const placed = PlacedOf(tensor);
  if (placed == nullptr) return tensor;
  const at::Tensor part = PartForUse(tensor);
  return placed->placement.kind == TensorPlacement::kWholeView
             ? part
             : placed->group->Gather(part, placed->placement.dim);
}

at::Tensor PartAs(const at::Tensor& tensor, int64_t dim,
                  const std::shared_ptr<PartGroup>& group) {
  Placed* const placed = PlacedOf(tensor);
  if (placed != nullptr && placed->placement == TensorPlacement::Shard(dim)) {
    return PartForUse(tensor);
  }
  return group->Slice(Whole(tensor), dim);
}

}  // namespace tessera
