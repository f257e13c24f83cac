// OutsideTensor: a tensor that is held from a part of a forward until that is
// computed again: what a tape reads and has not made, inputs, parameters,
// constants; what a checkpointed function keeps.
//
// It is held as autograd would hold it. Of a parameter that a flat owns nothing
// is held but its tag; of a cast of one a recipe
// (sharding/dispatch/saved_casts.h); what the watch of a part around this one
// takes is that one's to compute again. Any other tensor keeps its memory
// alive.
//
// For tapes it is copied when an operator of the thread is about to write to it
// (OutsideTensors::BeforeWrite): autograd would allow the write. Copied at once
// is what somebody may change or take away without an operator: memory that a
// tensor only borrows (from_blob), and small memory on the CPU (kCopiedBytes),
// which programs fill through accessors.
//
// Threads: of one thread until the forward has ended, then of any, one at a
// time.
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
  // `outer`: the watch of a part around this one; null: none.
  explicit OutsideTensor(const at::Tensor& tensor,
                         OperatorWatch* outer = nullptr);

  // A tensor at `place` of its memory, with the values of then, without
  // history; null: the tensor itself. `pins` hold it. Throws libtorch's error
  // of a changed version, naming `reader` unless that is empty.
  at::Tensor Value(const TensorPlace* place, absl::string_view reader,
                   PinSet* pins) const;
  // The tensor has not been written since.
  bool IsUnchanged() const { return !version_.changed(); }
  // Is what `tensor`, over the same storage, is now.
  bool IsNow(const at::Tensor& tensor) const;
  // From now on a copy of its memory is held.
  void Copy();
  // From now on its memory is where the group has put it; not a flat's, nor
  // what has changed or stays there. `what`: for messages.
  void MoveTo(ActivationStore::Group* group, const std::string& what);
  // `tensor`, over the same storage and the same now, is there all the same:
  // held again, since nothing is gained.
  void MoveBack(const at::Tensor& tensor);
  // The copy. REQUIRES: Copy, of a tensor that no flat owns.
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

// Those of a thread's tapes.
class OutsideTensors {
 public:
  static constexpr int64_t kCopiedBytes = 64 << 10;

  // The same one for the same values.
  std::shared_ptr<OutsideTensor> Of(const at::Tensor& tensor);
  // An operator is about to write to `tensor`.
  void BeforeWrite(const at::Tensor& tensor);

 private:
  void Prune();

  static constexpr size_t kPruneAt = 256;
  StorageMap<std::vector<std::weak_ptr<OutsideTensor>>> by_storage_;
  size_t prune_at_ = kPruneAt;  // of entries
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_OUTSIDE_TENSOR_H_
