// OutsideTensor: what a tape reads and has not made: inputs of a part of a
// forward, parameters, constants. Held until the tape has been run again.
//
// Of a parameter that a flat owns nothing is held but its tag; of a cast of one
// a recipe (sharding/dispatch/saved_casts.h). Any other tensor keeps its memory
// alive, and is copied when an operator of the thread is about to write to it
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
#include "absl/container/flat_hash_map.h"
#include "offload/activation_store.h"
#include "sharding/dispatch/saved_casts.h"
#include "sharding/flat/pins.h"
#include "sharding/recompute/placed_tensor.h"

namespace tessera {

class OutsideTensor {
 public:
  explicit OutsideTensor(const at::Tensor& tensor);

  // A tensor at `place` of its memory, with the values of then; null: the
  // tensor itself. `pins` hold it. Throws libtorch's error of a changed
  // version, naming `reader`.
  at::Tensor Value(const TensorPlace* place, const std::string& reader,
                   PinSet* pins) const;
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
  at::Tensor alias_;  // without history; undefined with `cast_`
  std::unique_ptr<SavedCast> cast_;
  c10::Storage copy_;
  int64_t version_ = 0;
  bool copied_ = false;
  std::shared_ptr<ActivationStore> store_;
  ActivationStore::Stored stored_;  // not null: instead of alias_ or copy_
};

// Those of a thread, over all of its tapes.
class OutsideTensors {
 public:
  static constexpr int64_t kCopiedBytes = 64 << 10;

  // The same one for the same values.
  std::shared_ptr<OutsideTensor> Of(const at::Tensor& tensor);
  // An operator is about to write to `tensor`.
  void BeforeWrite(const at::Tensor& tensor);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<std::weak_ptr<OutsideTensor>> held;
  };
  void Prune();

  static constexpr size_t kPruneAt = 256;
  absl::flat_hash_map<const c10::StorageImpl*, Entry> by_storage_;
  size_t prune_at_ = kPruneAt;  // of entries
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_OUTSIDE_TENSOR_H_
