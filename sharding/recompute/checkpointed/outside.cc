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
#include "base/torch/torch_scope.h"
#include "sharding/flat/registry.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

void RegionStorages::Add(const at::Tensor& made) {
  const auto* storage = StorageOf(made);
  if (storage == nullptr || made_.contains(storage)) return;
  made_.emplace(storage, made.storage().getWeakStorageImpl());
}

void OutsideWrites::Keep(const at::Tensor& tensor, OperatorWatch* outer) {
  const c10::Storage& storage = tensor.storage();
  before_.emplace(storage.unsafeGetStorageImpl(),
                  Written{storage.getWeakStorageImpl(),
                          KeptValue(CloneOf(BytesOf(storage)), outer),
                          tensor.requires_grad()});
}

void OutsideWrites::DropUnchanged(const at::Tensor& tensor) {
  auto it = before_.find(StorageOf(tensor));
  if (it == before_.end()) return;
  TorchScope scope;
  if (at::equal(it->second.bytes.Get(), BytesOf(tensor.storage()))) {
    before_.erase(it);
  }
}

at::Tensor OutsideWrites::Before(const c10::StorageImpl* storage) const {
  auto it = before_.find(storage);
  return it == before_.end() ? at::Tensor() : it->second.bytes.Get();
}

void OutsideReads::Add(const at::Tensor& tensor,
                       const c10::OperatorHandle& op) {
  const auto* storage = StorageOf(tensor);
  if (storage == nullptr || tensor.is_inference()) return;
  if (reads_.contains(storage)) return;
  const auto& counter = torch::autograd::impl::version_counter(tensor);
  reads_.emplace(storage, Read{tensor.storage().getWeakStorageImpl(), counter,
                               counter.current_version(), op,
                               c10::DimVector(tensor.sizes())});
}

std::string OutsideReads::Changed(const OutsideWrites& writes) const {
  for (const auto& [storage, read] : reads_) {
    const uint32_t now = read.counter.current_version();
    if (now == read.version || writes.Contains(storage)) continue;
    const StorageOwner owned = Registry::Global().Find(storage);
    return absl::StrCat(
        owned ? absl::StrCat("parameter '", owned.parameter(), "'")
              : absl::StrCat("a tensor of sizes [",
                             absl::StrJoin(read.sizes, ", "), "]"),
        ", which operator ", read.op.schema().name(),
        " reads in there, was changed in place between forward and backward: "
        "it is at version ",
        now, ", expected version ", read.version,
        "; change it after backward, or give the region a clone() of it");
  }
  return "";
}

Redirects::Redirect* Redirects::Make(const c10::Storage& storage,
                                     const at::Tensor& bytes) {
  const at::Tensor copy = CloneOf(bytes);
  auto [it, added] = redirects_.emplace(
      storage.unsafeGetStorageImpl(),
      Redirect{storage.getWeakStorageImpl(), copy.storage()});
  copies_.insert(StorageOf(copy));
  return &it->second;
}

const c10::Storage* Redirects::CopyOf(const c10::StorageImpl* storage) {
  auto it = redirects_.find(storage);
  if (it != redirects_.end()) return &it->second.copy;
  const at::Tensor before = writes_.Before(storage);
  if (!before.defined()) return nullptr;
  // Its address is that of the original, which may be gone.
  const at::Tensor copy = CloneOf(before);
  it = redirects_
           .emplace(storage, Redirect{copy.storage().getWeakStorageImpl(),
                                      copy.storage()})
           .first;
  it->second.by_forward = true;
  it->second.requires_grad = writes_.RequiredGrad(storage);
  copies_.insert(StorageOf(copy));
  return &it->second.copy;
}

at::Tensor Redirects::Of(const at::Tensor& tensor, bool written) {
  const auto* storage = StorageOf(tensor);
  if (storage == nullptr || copies_.contains(storage)) return {};
  if (CopyOf(storage) == nullptr) {
    if (!written || Registry::Global().Find(tensor)) return {};
    Make(tensor.storage(), BytesOf(tensor.storage()));
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
