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
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "parallel/tensor/gradients.h"

namespace tessera {
namespace {

using torch::autograd::AutogradMeta;
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

// A dimension of several groups as two, of which the second is divided; and one
// again.
at::Tensor Split(const at::Tensor& tensor, const TensorPlacement& placement) {
  return placement.groups == 1
             ? tensor
             : tensor.unflatten(placement.dim, {placement.groups, -1});
}

int64_t DimOfSplit(const TensorPlacement& placement) {
  return placement.dim + (placement.groups == 1 ? 0 : 1);
}

at::Tensor Joined(const at::Tensor& tensor, const TensorPlacement& placement) {
  return placement.groups == 1
             ? tensor
             : tensor.flatten(placement.dim, placement.dim + 1);
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
  static void SetDtype(c10::TensorImpl* tensor, caffe2::TypeMeta dtype) {
    constexpr auto kDtype = &PlacedImpl::data_type_;
    tensor->*kDtype = dtype;
  }
};

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
    if (placement_.kind == TensorPlacement::kCopy && gradients[0].defined()) {
      return {group_->AddendOf(Whole(gradients[0]))};
    }
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
    // A function of the user's computes with whole gradients.
    if (placement_.kind == TensorPlacement::kCopy && gradients[0].defined()) {
      return {group_->Sum(gradients[0])};
    }
    return {PlacedGradient(std::move(gradients[0]), placement_, group_)};
  }

  const TensorPlacement placement_;
  const std::shared_ptr<PartGroup> group_;
};

// A tensor and its part have one version counter, so that a write is seen by
// whoever has saved either.
void ShareVersion(const at::Tensor& tensor) {
  const at::Tensor& part = PlacedOf(tensor)->part;
  if (tensor.is_inference() || part.is_inference()) return;
  tensor.unsafeGetTensorImpl()->set_version_counter(
      part.unsafeGetTensorImpl()->version_counter());
}

// Connects `result` to `source` by a node.
void Connect(const at::Tensor& source, const at::Tensor& result,
             const std::shared_ptr<Node>& node) {
  node->add_next_edge(torch::autograd::impl::gradient_edge(source));
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(result), node);
}

// Connects a placed tensor to its part as that is now.
void Reconnect(const at::Tensor& tensor) {
  const Placed& placed = *PlacedOf(tensor);
  if (!at::GradMode::is_enabled() || !placed.part.requires_grad()) return;
  Connect(
      placed.part, tensor,
      std::make_shared<ToPlaced>(placed.part, placed.placement, placed.group));
}

}  // namespace

bool GoesOnByPart(const at::Tensor& tensor) {
  return dynamic_cast<ToPlaced*>(tensor.grad_fn().get()) != nullptr;
}

at::Tensor Place(at::Tensor part, TensorPlacement placement,
                 std::shared_ptr<PartGroup> group) {
  std::vector<int64_t> sizes = part.sizes().vec();
  if (placement.kind == TensorPlacement::kShard) {
    TESSERA_CHECK(placement.dim >= 0 && placement.dim < part.dim());
    sizes[static_cast<size_t>(placement.dim)] *= group->size();
  }
  at::Tensor placed = at::detail::make_tensor<PlacedImpl>(part, sizes);
  // Code goes by whether it is contiguous (contiguous(), aten::reshape).
  const bool is_shard = placement.kind == TensorPlacement::kShard;
  if (!is_shard || !part.is_contiguous()) {
    placed.unsafeGetTensorImpl()->set_sizes_and_strides(
        sizes, is_shard ? StridesLike(part, sizes) : part.strides().vec());
  }
  placed.unsafeGetTensorImpl()
      ->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  placed.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Placed>(
      std::move(part), placement, std::move(group)));
  ShareVersion(placed);
  Reconnect(placed);
  return placed;
}

void RenewHistory(const at::Tensor& tensor) {
  const Placed& placed = *PlacedOf(tensor);
  if (!at::GradMode::is_enabled() || !placed.part.requires_grad()) return;
  Reconnect(tensor);
  AutogradMeta* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  meta->cpp_hooks_list_.reset();
  meta->hooks_.clear();
  const c10::intrusive_ptr<c10::TensorImpl> base = placed.base.lock();
  if (base != nullptr) RenewHistory(at::Tensor(base));
}

void PlaceInPlace(const at::Tensor& parameter, at::Tensor part,
                  TensorPlacement placement, std::shared_ptr<PartGroup> group) {
  c10::TensorImpl* const impl = parameter.unsafeGetTensorImpl();
  PlacedImpl::AddKey(impl);
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  impl->set_backend_meta(c10::make_intrusive<Placed>(std::move(part), placement,
                                                     std::move(group)));
  ShareVersion(parameter);
  ConnectLeaf(parameter);
}

void ConnectLeaf(const at::Tensor& leaf) {
  Placed& placed = *PlacedOf(leaf);
  if (!placed.part.requires_grad()) return;
  // A function of the user's that is given the leaf gets this one.
  placed.accumulator =
      std::make_shared<ToPlaced>(placed.part, placed.placement, placed.group);
  placed.accumulator->add_next_edge(
      torch::autograd::impl::gradient_edge(placed.part));
  placed.accumulator->add_input_metadata(leaf);
  torch::autograd::impl::set_grad_accumulator(leaf, placed.accumulator);
  if (placed.part.is_leaf()) FollowPart(leaf);
}

void RenewDtype(const at::Tensor& parameter) {
  const at::Tensor& part = PlacedOf(parameter)->part;
  if (parameter.dtype() == part.dtype()) return;
  PlacedImpl::SetDtype(parameter.unsafeGetTensorImpl(), part.dtype());
  ConnectLeaf(parameter);
}

void GatherInPlace(const at::Tensor& parameter) {
  const Placed& placed = *PlacedOf(parameter);
  at::Tensor whole = placed.part.detach();
  if (placed.placement.kind == TensorPlacement::kShard) {
    TorchScope scope;
    whole = at::empty_strided(parameter.sizes(), parameter.strides(),
                              placed.part.options().requires_grad(false));
    const TensorPlacement& placement = placed.placement;
    whole.copy_(
        Joined(placed.group->GatherOf(Split(placed.part.detach(), placement),
                                      DimOfSplit(placement)),
               placement));
  }
  // Sizes, keys and memory become the whole's; what autograd knows stays.
  c10::TensorImpl* const impl = parameter.unsafeGetTensorImpl();
  impl->set_backend_meta(nullptr);
  impl->shallow_copy_from(whole.getIntrusivePtr());
  torch::autograd::impl::set_grad_accumulator(parameter, {});
}

at::Tensor PartForUse(const at::Tensor& tensor) {
  Placed* const placed = PlacedOf(tensor);
  if (placed == nullptr) return tensor;
  const std::shared_ptr<Node>& current = tensor.grad_fn();
  if (current == nullptr || dynamic_cast<ToPlaced*>(current.get()) != nullptr ||
      !at::GradMode::is_enabled()) {
    return placed->part;
  }
  const std::shared_ptr<Node> node = current;
  for (const Edge& edge : node->next_edges()) {
    const auto* const given = dynamic_cast<ToPlaced*>(edge.function.get());
    if (given != nullptr) given->Check();
  }
  at::Tensor part = placed->part.detach();
  Connect(tensor, part,
          std::make_shared<ToPart>(placed->placement, placed->group));
  placed->part = part;
  AutogradMeta* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  const bool retains = std::exchange(meta->retains_grad_, false);
  if (retains) node->pop_retains_grad_hook(meta->output_nr_);
  Reconnect(tensor);
  if (retains) tensor.retain_grad();
  return part;
}

at::Tensor Whole(const at::Tensor& tensor) {
  Placed* const placed = PlacedOf(tensor);
  if (placed == nullptr) return tensor;
  at::Tensor part = PartForUse(tensor);
  if (placed->placement.kind == TensorPlacement::kCopy) {
    return placed->group->CountOnce(part);
  }
  // An engine's parameter may have no memory but while an operator uses it.
  if (part.key_set().has(kTagKey)) part = part.clone();
  return placed->placement.kind == TensorPlacement::kWholeView
             ? part
             : Joined(placed->group->Gather(Split(part, placed->placement),
                                            DimOfSplit(placed->placement)),
                      placed->placement);
}

at::Tensor WholeForParts(const at::Tensor& tensor,
                         const std::shared_ptr<PartGroup>& group) {
  const Placed* const placed = PlacedOf(tensor);
  if (placed != nullptr && placed->placement.kind == TensorPlacement::kCopy) {
    return PartForUse(tensor);
  }
  return group->SumInBackward(Whole(tensor));
}

at::Tensor PartAs(const at::Tensor& tensor, const TensorPlacement& placement,
                  const std::shared_ptr<PartGroup>& group) {
  Placed* const placed = PlacedOf(tensor);
  if (placed != nullptr && placed->placement == placement) {
    return PartForUse(tensor);
  }
  if (placed != nullptr && placed->placement.kind == TensorPlacement::kCopy) {
    return Joined(group->SliceOf(Split(PartForUse(tensor), placement),
                                 DimOfSplit(placement)),
                  placement)
        .contiguous();
  }
  return Joined(
      group->Slice(Split(Whole(tensor), placement), DimOfSplit(placement)),
      placement);
}

at::Tensor SlicePart(const at::Tensor& whole, const TensorPlacement& placement,
                     const PartGroup& group) {
  TorchScope scope;
  return Joined(group.SliceOf(Split(whole.detach(), placement),
                              DimOfSplit(placement)),
                placement)
      .clone(at::MemoryFormat::Contiguous);
}

}  // namespace tessera
