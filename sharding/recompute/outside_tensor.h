// OutsideTensor: a tensor that is held from a part of a forward until that is
// recomputed: what a tape reads but has not made (inputs, parameters,
// constants), and what a checkpointed function keeps.
//
// It is held as autograd would hold it. For a parameter that a flat owns, only
// its tag is held; for a cast of one, a recipe
// (sharding/dispatch/saved_casts.h); what the watch of an enclosing part takes,
// that part recomputes. Any other tensor keeps its memory alive.
//
// For tapes it is copied when an operator of the thread is about to write to it
// (OutsideTensors::BeforeWrite): autograd would allow the write. Memory that
// may change or go without an operator is copied at once: memory that a tensor
// only borrows (from_blob), and small memory on the CPU (kCopiedBytes), which
// programs fill through accessors.
//
// Threads: one until the forward has ended, then any, one at a time.
#ifndef SHARDING_RECOMPUTE_OUTSIDE_TENSOR_H_
#define SHARDING_RECOMPUTE_OUTSIDE_TENSOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "base/torch/placed_tensor.h"
#include "base/torch/saved_version.h"
#include "offload/activation_store.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/saved_casts.h"
#include "sharding/flat/pins.h"
#include "sharding/recompute/storage_map.h"

namespace tessera {

class OutsideTensor {
 public:
  // `outer`: the watch of an enclosing part; null: none.
  explicit OutsideTensor(const at::Tensor& tensor,
                         OperatorWatch* outer = nullptr);

  // Returns a tensor at `place` of its memory (null: the tensor itself) with
  // its values at the time, without history. `pins` hold it. Throws libtorch's
  // error of a changed version, with `reader` unless that is empty.
  at::Tensor Value(const TensorPlace* place, absl::string_view reader,
                   PinSet* pins) const;
  // Whether the tensor has not been written since.
  bool IsUnchanged() const { return !version_.changed(); }
  // Whether it equals what `tensor`, over the same storage, is now.
  bool IsNow(const at::Tensor& tensor) const;
  // Holds a copy of its memory from now on.
  void Copy();
  // Moves its memory to the group; does nothing for a flat's memory, and for
  // memory that has changed or stays. `what`: for messages.
  void MoveTo(ActivationStore::Group* group, const std::string& what);
  // Holds `tensor` again, which is over the same storage and unchanged: it is
  // in memory anyway, so moving it gains nothing.
  void MoveBack(const at::Tensor& tensor);
  // Returns the copy. REQUIRES: Copy, for a tensor that no flat owns.
  const c10::Storage& copy() const { return copy_; }

 private:
  std::unique_ptr<SavedCast> cast_;  // or
  at::Tensor alias_;                 // without history; or
  std::shared_ptr<SavedSlot> slot_;  // of the part around; or
  c10::Storage copy_;
  bool copied_ = false;
  SavedVersion version_;
  std::shared_ptr<ActivationStore> store_;
  ActivationStore::Stored stored_;  // not null: instead of alias_ or copy_
};

// The OutsideTensors of a thread's tapes.
class OutsideTensors {
 public:
  static constexpr int64_t kCopiedBytes = 64 << 10;

  // Returns the OutsideTensor of a tensor; the same one for the same values.
  std::shared_ptr<OutsideTensor> Of(const at::Tensor& tensor);
  // Must be called before an operator writes to `tensor`.
  void BeforeWrite(const at::Tensor& tensor);

 private:
  void Prune();

  static constexpr size_t kPruneAt = 256;
  StorageMap<std::vector<std::weak_ptr<OutsideTensor>>> by_storage_;
  size_t prune_at_ = kPruneAt;  // of entries
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_OUTSIDE_TENSOR_H_
