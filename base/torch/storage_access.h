// Holds all that the engine does to libtorch's StorageImpl and TensorImpl
// beyond their public interfaces.
#ifndef BASE_TORCH_STORAGE_ACCESS_H_
#define BASE_TORCH_STORAGE_ACCESS_H_

#include <string>

#include "ATen/core/Tensor.h"

namespace tessera {

// Put the tag (kTagKey) on a tensor, so that operators that receive it reach
// the fallback; take it off.
void AddTag(const at::Tensor& tensor);
void RemoveTag(const at::Tensor& tensor);
bool HasTag(const at::Tensor& tensor);

// Puts a leaf over another storage, with another dtype; sizes, strides and
// history stay.
void SetStorage(const at::Tensor& tensor,
                const c10::intrusive_ptr<c10::StorageImpl>& storage,
                at::ScalarType dtype);

// Points the storage at `data`, which it does not own. Its nbytes stay.
void PointStorage(c10::StorageImpl* storage, void* data, at::Device device);

// Takes the memory away: nbytes stay (views can be made, sizes read), and any
// access to the data throws `error`, in release builds too.
void UnpointStorage(c10::StorageImpl* storage, std::string error,
                    at::Device device);

// Unpoints again with the error of the last UnpointStorage; costs no
// allocation.
void UnpointStorageAgain(c10::StorageImpl* storage, at::Device device);

// While hidden, a storage keeps its memory, but an access throws the error of
// the last UnpointStorage, or `error`. Costs two stores. PointStorage shows it
// too.
void HideStorage(c10::StorageImpl* storage);
void HideStorageSaying(c10::StorageImpl* storage, std::string error);
void ShowStorage(c10::StorageImpl* storage);
// Whether an access would throw.
bool IsHidden(const c10::StorageImpl* storage);

}  // namespace tessera
#endif  // BASE_TORCH_STORAGE_ACCESS_H_
