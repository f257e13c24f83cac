// Why writes go to copies, and the real tensors are not written and put back:
// others may read them meanwhile, their versions would tell of changes that
// there were not, and their histories would be of a graph that nobody goes back
// through.
//
// Why copies are found by storages: a view of what was redirected is made
// without our knowledge, of the original; it is redirected when it is used.
#include "sharding/recompute/checkpointed/outside.h"

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch/placed_tensor.h"
#include "base/torch/torch_scope.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

void OutsideWrites::Keep(const at::Tensor& tensor, OperatorWatch* outer) {
  const c10::Storage& storage = tensor.storage();
  before_.Add(storage, {OutsideTensor(BytesOf(CopyOf(storage)), outer),
                        tensor.requires_grad()});
}

void OutsideWrites::DropUnchanged(const at::Tensor& tensor) {
  const auto* const storage = StorageOf(tensor);
  const at::Tensor before = Before(storage);
  TorchScope scope;
  if (before.defined() && at::equal(before, BytesOf(tensor.storage()))) {
    before_.Erase(storage);
  }
}

at::Tensor OutsideWrites::Before(const c10::StorageImpl* storage) const {
  const Written* const written = before_.Find(storage);
  PinSet none;
  return written == nullptr
             ? at::Tensor()
             : written->bytes.Value(nullptr, /*reader=*/"", &none);
}

void OutsideReads::Add(const at::Tensor& tensor,
                       const c10::OperatorHandle& op) {
  const auto* const storage = StorageOf(tensor);
  if (storage == nullptr || tensor.is_inference()) return;
  if (reads_.Contains(storage)) return;
  reads_.Add(tensor.storage(),
             {SavedVersion(tensor), op, c10::DimVector(tensor.sizes())});
}

std::string OutsideReads::Changed(const OutsideWrites& writes) const {
  std::string changed;
  reads_.ForEach([&](const c10::StorageImpl* storage, const Read& read) {
    if (!changed.empty() || !read.version.changed()) return;
    if (writes.Contains(storage)) return;
    const StorageOwner owned = Registry::Global().Find(storage);
    changed = absl::StrCat(
        owned ? absl::StrCat("parameter '", owned.parameter(), "'")
              : absl::StrCat("a tensor of sizes [",
                             absl::StrJoin(read.sizes, ", "), "]"),
        ", which operator ", read.op.schema().name(),
        " reads in there, was changed in place between forward and backward: "
        "it is at version ",
        read.version.now(), ", expected version ", read.version.saved(),
        "; change it after backward, or give the region a clone() of it");
  });
  return changed;
}

Redirects::Redirect& Redirects::Add(const c10::StorageImpl* storage,
                                    const at::Tensor& bytes) {
  TorchScope scope;
  Redirect& redirect = redirects_[storage];
  redirect.copy = bytes.clone().storage();
  copies_.insert(redirect.copy.unsafeGetStorageImpl());
  return redirect;
}

const c10::Storage* Redirects::CopyOf(const c10::StorageImpl* storage) {
  const auto it = redirects_.find(storage);
  if (it != redirects_.end()) return &it->second.copy;
  const at::Tensor before = writes_.Before(storage);
  if (!before.defined()) return nullptr;
  Redirect& redirect = Add(storage, before);
  redirect.by_forward = true;
  redirect.requires_grad = writes_.RequiredGrad(storage);
  return &redirect.copy;
}

at::Tensor Redirects::Of(const at::Tensor& tensor, bool written) {
  const auto* storage = StorageOf(tensor);
  if (storage == nullptr || copies_.contains(storage)) return {};
  if (CopyOf(storage) == nullptr) {
    if (!written || Registry::Global().Find(tensor)) return {};
    Add(storage, BytesOf(tensor.storage()));
  }
  Redirect& redirect = redirects_.find(storage)->second;
  GradRole role(tensor);
  const bool with_grad =
      redirect.requires_grad &&
      torch::autograd::isDifferentiableType(tensor.scalar_type());
  if (redirect.by_forward) role.requires_grad = with_grad;
  if (with_grad && !role.requires_grad) {
    role.requires_grad = true;
    role.leaf = false;
  }
  auto& [original, other] = redirect.tensors[tensor.unsafeGetTensorImpl()];
  if (other.defined() && other.requires_grad() >= role.requires_grad) {
    return other;
  }
  at::Tensor alias(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      redirect.counter, /*allow_tensor_metadata_change=*/true));
  alias.unsafeGetTensorImpl()->set_storage_keep_dtype(redirect.copy);
  original = tensor;
  other = InRole(alias, role);
  return other;
}

void Redirects::NoteHistories() {
  for (auto& [storage, redirect] : redirects_) {
    for (const auto& [impl, tensors] : redirect.tensors) {
      redirect.requires_grad |= tensors.second.requires_grad();
    }
  }
}

}  // namespace tessera
