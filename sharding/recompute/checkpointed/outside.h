// Tracks what a region does with tensors that were not made in it.
//
//   forward       reads: at which versions    OutsideReads
//                 writes: what was there      OutsideWrites
//   again         both go to copies of that   Redirects
//
// Storages are held by weak references (storage_map.h); one that was made in
// the region is not outside.
//
// Threads: none of its own; one region's forward and each run again are one
// thread's.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_OUTSIDE_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_OUTSIDE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "base/torch/saved_version.h"
#include "sharding/recompute/outside_tensor.h"
#include "sharding/recompute/storage_map.h"

namespace tessera {

class OutsideWrites {
 public:
  bool Contains(const c10::StorageImpl* storage) const {
    return before_.Contains(storage);
  }
  // Keeps all of `tensor`'s storage, which is about to be written.
  void Keep(const at::Tensor& tensor, OperatorWatch* outer);
  // Drops the copy if the storage still holds the same: it was not written.
  void DropUnchanged(const at::Tensor& tensor);
  // Returns the bytes from before; undefined if it was not written.
  at::Tensor Before(const c10::StorageImpl* storage) const;
  // Whether it had a gradient then. REQUIRES: it was written.
  bool RequiredGrad(const c10::StorageImpl* storage) const {
    return before_.Find(storage)->required_grad;
  }

 private:
  struct Written {
    OutsideTensor bytes;
    bool required_grad;
  };
  StorageMap<Written> before_;
};

class OutsideReads {
 public:
  void Add(const at::Tensor& tensor, const c10::OperatorHandle& op);
  // "" if nothing of it has changed, except what `writes` has; else what did.
  std::string Changed(const OutsideWrites& writes) const;

 private:
  struct Read {
    SavedVersion version;
    c10::OperatorHandle op;
    c10::DimVector sizes;
  };
  StorageMap<Read> reads_;
};

class Redirects {
 public:
  // `writes` lives longer.
  explicit Redirects(const OutsideWrites& writes) : writes_(writes) {}

  // The copy of a storage that forward wrote; null if it did not.
  const c10::Storage* CopyOf(const c10::StorageImpl* storage);
  // The tensor to use instead of `tensor`, which lies in a storage that was not
  // made in this run and which is about to be read, or written. Undefined: it
  // itself.
  at::Tensor Of(const at::Tensor& tensor, bool written);
  // An operator that wrote has ended.
  void NoteHistories();

 private:
  struct Redirect {
    c10::Storage copy;
    c10::VariableVersion counter{0};
    // What took part so far, and instead of it.
    absl::flat_hash_map<const c10::TensorImpl*,
                        std::pair<at::Tensor, at::Tensor>>
        tensors;
    // Forward wrote it, and left its tensors with the history of that. Here
    // they have one once something with a gradient was written again.
    bool by_forward = false;
    bool requires_grad = false;
  };
  Redirect& Add(const c10::StorageImpl* storage, const at::Tensor& bytes);

  const OutsideWrites& writes_;
  // Their storages are alive, or known to `writes_`.
  absl::flat_hash_map<const c10::StorageImpl*, Redirect> redirects_;
  absl::flat_hash_set<const c10::StorageImpl*> copies_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_OUTSIDE_H_
