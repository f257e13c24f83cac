// A leaf's hooks are run by hooks of its part, which are in the part's
// AutogradMeta and so outlive its gradient accumulator. They are added when the
// part is placed, so they come before those of an engine, which may take the
// gradient away.
//
// grad() returns a reference, so a placed gradient has to lie somewhere: in the
// leaf's AutogradMeta, whose class is ours. It is dropped as soon as the part's
// gradient may be another.
#include "parallel/tensor/gradients.h"

#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "base/torch/grad_access.h"
#include "base/torch/moved_autograd_meta.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

class PlacedMeta : public MovedAutogradMeta {
 public:
  // Takes all contents of `other`, which is that of `tensor`.
  PlacedMeta(const at::Tensor& tensor, autograd::AutogradMeta* other)
      : MovedAutogradMeta(other), tensor_(tensor.unsafeGetTensorImpl()) {}

  // Returns the tensor's; null if it is of another class.
  static PlacedMeta* Of(const at::Tensor& tensor) {
    return dynamic_cast<PlacedMeta*>(autograd::impl::get_autograd_meta(tensor));
  }

  const at::Tensor& grad() const override {
    const Placed* const placed = GetPlaced();
    if (placed == nullptr) return grad_;
    TakeAssigned();
    const at::Tensor& of = placed->part.grad();
    const std::lock_guard<std::mutex> lock(mirror_mutex_);
    if (!of.defined()) {
      mirror_.reset();
      return grad_;
    }
    const Placed* const mirrored = PlacedOf(mirror_);
    if (mirrored == nullptr || !mirrored->part.is_same(of)) {
      mirror_ = PlacedGradient(of, placed->placement, placed->group);
    }
    return mirror_;
  }

  at::Tensor& mutable_grad() override {
    const Placed* const placed = GetPlaced();
    if (placed == nullptr) return grad_;
    DropMirror();
    TakeAssigned();
    return placed->part.mutable_grad();
  }

  void DropMirror() const {
    const std::lock_guard<std::mutex> lock(mirror_mutex_);
    mirror_.reset();
  }

  // Makes what was assigned to mutable_grad() the part's gradient.
  void TakeAssigned() const {
    const Placed& placed = *GetPlaced();
    const at::Tensor assigned = PeekGrad(placed.part);
    if (!assigned.defined() || (PlacedOf(assigned) == nullptr &&
                                assigned.sizes() == placed.part.sizes())) {
      return;
    }
    placed.part.mutable_grad() =
        PartOfGradient(assigned, placed.placement, placed.group);
  }

  // Whether the hooks of this tensor are run by `part`.
  bool Follows(const at::Tensor& part) const {
    return followed_._unsafe_get_target() == part.unsafeGetTensorImpl();
  }
  void SetFollowed(const at::Tensor& part) {
    followed_ = WeakTensor(part.getIntrusivePtr());
  }

 private:
  // Returns null if it is not placed any more.
  const Placed* GetPlaced() const {
    if (!tensor_->key_set().has(kAboveKey)) return nullptr;
    return static_cast<const Placed*>(tensor_->get_backend_meta());
  }

  c10::TensorImpl* const tensor_;  // owns this
  mutable std::mutex mirror_mutex_;
  mutable at::Tensor mirror_;  // undefined, or placed: the part's gradient
  WeakTensor followed_{c10::intrusive_ptr<c10::TensorImpl>()};
};

// A leaf whose part is `part`, as that part's hooks know it.
class FollowedLeaf {
 public:
  FollowedLeaf(const at::Tensor& leaf, const at::Tensor& part)
      : leaf_(leaf.getIntrusivePtr()), part_(part.unsafeGetTensorImpl()) {}

  // Returns it; undefined if it is gone, or has another part by now.
  at::Tensor Get() const {
    const c10::intrusive_ptr<c10::TensorImpl> leaf = leaf_.lock();
    if (leaf == nullptr) return at::Tensor();
    at::Tensor tensor(leaf);
    const Placed* const placed = PlacedOf(tensor);
    return placed != nullptr && placed->part.unsafeGetTensorImpl() == part_
               ? tensor
               : at::Tensor();
  }

 private:
  const WeakTensor leaf_;
  const c10::TensorImpl* const part_;
};

// Returns what the leaf's hooks make of the part's gradient; undefined: it
// stays.
at::Tensor RunHooks(const FollowedLeaf& followed, const at::Tensor& gradient) {
  const at::Tensor leaf = followed.Get();
  if (!leaf.defined()) return at::Tensor();
  if (const auto* const meta = PlacedMeta::Of(leaf)) {
    meta->DropMirror();
    meta->TakeAssigned();
  }
  const auto& hooks = autograd::impl::hooks(leaf);
  if (hooks.empty()) return at::Tensor();
  const Placed& placed = *PlacedOf(leaf);
  autograd::variable_list values = {
      PlacedGradient(gradient, placed.placement, placed.group)};
  for (const auto& hook : hooks) values = (*hook)(values);
  return PartOfGradient(values[0], placed.placement, placed.group);
}

// The part's post-accumulate hook: calls the leaf's.
class LeafAccumulated final : public autograd::PostAccumulateGradHook {
 public:
  using Hook = std::unique_ptr<autograd::PostAccumulateGradHook>;

  LeafAccumulated(FollowedLeaf followed, Hook previous)
      : followed_(std::move(followed)), previous_(std::move(previous)) {}

  void operator()(const at::Tensor& part) override {
    if (previous_ != nullptr) (*previous_)(part);
    const at::Tensor leaf = followed_.Get();
    if (!leaf.defined()) return;
    const Hook& hook = autograd::impl::post_acc_grad_hooks(leaf);
    if (hook == nullptr) return;
    (*hook)(leaf);
    if (const auto* const meta = PlacedMeta::Of(leaf)) {
      meta->TakeAssigned();
      meta->DropMirror();
    }
  }

 private:
  const FollowedLeaf followed_;
  const Hook previous_;
};

}  // namespace

at::Tensor PlacedGradient(at::Tensor gradient, const TensorPlacement& placement,
                          const std::shared_ptr<PartGroup>& group) {
  if (!gradient.defined() || placement.kind != TensorPlacement::kShard) {
    return gradient;
  }
  return Place(std::move(gradient), placement, group);
}

at::Tensor PartOfGradient(const at::Tensor& gradient,
                          const TensorPlacement& placement,
                          const std::shared_ptr<PartGroup>& group) {
  if (!gradient.defined()) return gradient;
  if (placement.kind != TensorPlacement::kShard) return Whole(gradient);
  return PartAs(gradient, placement, group);
}

void MirrorGradient(const at::Tensor& tensor) {
  autograd::AutogradMeta* const meta =
      autograd::impl::materialize_autograd_meta(tensor);
  // One of ours is left by an engine that is closed, and does nothing more.
  if (PlacedMeta::Of(tensor) != nullptr ||
      (typeid(*meta) != typeid(autograd::AutogradMeta) &&
       dynamic_cast<MovedAutogradMeta*>(meta) == nullptr)) {
    return;
  }
  tensor.unsafeGetTensorImpl()->set_autograd_meta(
      std::make_unique<PlacedMeta>(tensor, meta));
}

void FollowPart(const at::Tensor& leaf) {
  MirrorGradient(leaf);
  PlacedMeta* const meta = PlacedMeta::Of(leaf);
  const at::Tensor& part = PlacedOf(leaf)->part;
  if (meta == nullptr || meta->Follows(part)) return;
  meta->SetFollowed(part);
  const FollowedLeaf followed(leaf, part);
  part.register_hook([followed](const at::Tensor& gradient) {
    return RunHooks(followed, gradient);
  });
  autograd::impl::set_post_acc_grad_hooks(
      part,
      std::make_unique<LeafAccumulated>(
          followed, std::move(autograd::impl::post_acc_grad_hooks(part))));
}

}  // namespace tessera
