#include "base/torch/storage_access.h"

#include <utility>

#include "base/torch/torch_scope.h"
#include "c10/core/StorageImpl.h"
#include "c10/core/TensorImpl.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

// StorageImpl has a public way to make accesses throw, but none to stop that;
// the flag is private. An explicit template instantiation may name private
// members.
template <typename Tag, typename Tag::type kMember>
struct Expose {
  friend typename Tag::type Member(Tag) { return kMember; }
};
struct ThrowFlag {
  using type = bool c10::StorageImpl::*;
  friend type Member(ThrowFlag);
};
template struct Expose<ThrowFlag,
                       &c10::StorageImpl::throw_on_immutable_data_ptr_>;
// Says whether access for writing checks the flag.
struct CheckFlag {
  using type = bool c10::StorageImpl::*;
  friend type Member(CheckFlag);
};
template struct Expose<CheckFlag,
                       &c10::StorageImpl::has_mutable_data_ptr_check_>;

// TensorImpl's key set is protected, and nothing public sets one key of it.
struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet& Of(c10::TensorImpl* impl) {
    return impl->*(&KeySetAccess::key_set_);
  }
};

}  // namespace

void AddTag(const at::Tensor& tensor) {
  auto& keys = KeySetAccess::Of(tensor.unsafeGetTensorImpl());
  keys = keys.add(kTagKey);
}

void RemoveTag(const at::Tensor& tensor) {
  auto& keys = KeySetAccess::Of(tensor.unsafeGetTensorImpl());
  keys = keys.remove(kTagKey);
}

bool HasTag(const at::Tensor& tensor) { return tensor.key_set().has(kTagKey); }

void SetStorage(const at::Tensor& tensor,
                const c10::intrusive_ptr<c10::StorageImpl>& storage,
                at::ScalarType dtype) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_storage_and_dtype(c10::Storage(storage),
                              c10::scalarTypeToTypeMeta(dtype));
  // An accumulator that was made before would cast gradients to the old dtype.
  torch::autograd::impl::set_grad_accumulator(tensor, {});
}

void PointStorage(c10::StorageImpl* storage, void* data, at::Device device) {
  storage->*Member(ThrowFlag()) = false;
  // set_data_ptr_noswap refreshes the checks that depend on the flag.
  storage->set_data_ptr_noswap(c10::DataPtr(data, device));
}

void UnpointStorage(c10::StorageImpl* storage, std::string error,
                    at::Device device) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(error));
}

void UnpointStorageAgain(c10::StorageImpl* storage, at::Device device) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  HideStorage(storage);
}

void HideStorage(c10::StorageImpl* storage) {
  storage->*Member(ThrowFlag()) = true;
  storage->*Member(CheckFlag()) = true;
}

void HideStorageSaying(c10::StorageImpl* storage, std::string error) {
  // Releases nothing, despite its name.
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(error));
}

void ShowStorage(c10::StorageImpl* storage) {
  storage->*Member(ThrowFlag()) = false;
  storage->*Member(CheckFlag()) = false;
}

bool IsHidden(const c10::StorageImpl* storage) {
  return storage->*Member(ThrowFlag());
}

}  // namespace tessera
