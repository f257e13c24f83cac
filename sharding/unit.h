// Unit: parameters that are gathered, freed and reduced together.
//
//   flat   [ w1 ..| b1 .| w2 ....|....]   P bytes (sharding/layout.h)
//   owned  flat[r*S, (r+1)*S)             what this rank's optimizer updates
//                                         (all of flat where states are whole)
//
// Every parameter keeps its own TensorImpl, sizes, strides and StorageImpl;
// only the StorageImpl's pointer is moved into the flat buffer while the unit
// is whole, and taken away while it is freed. Parameters that share a storage
// go on sharing it.
//
// A pin keeps the unit whole: every operator pins all its units before it runs.
// What is not pinned may be freed at any time (sharding/residency.h decides);
// until then its memory is hidden: an access throws as if it were freed.
//
// Invariants: gaps of flat and shard are zero; while freed, the shards of all
// ranks are the only copy; a dirty unit's own slice goes back to its shard when
// it is freed.
//
// Threads: all methods may be called from any thread.
#ifndef SHARDING_UNIT_H_
#define SHARDING_UNIT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "sharding/flat_buffer.h"
#include "sharding/layout.h"

namespace tessera {

class Residency;  // sharding/residency.h

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

// The three booleans that a ZeRO stage is.
struct Stage {
  bool sharded_optimizer = false;
  bool sharded_gradients = false;
  bool sharded_parameters = false;
  static Stage Of(int stage) { return {stage >= 1, stage >= 2, stage >= 3}; }
};

class Unit {
 public:
  struct Parameter {
    at::Tensor tensor;  // the module's own
    std::string name;
    int index = 0;   // in the model, over all units
    int slot = 0;    // its storage in the unit
    ByteRange flat;  // its elements in the flat buffer, dense
  };
  // The part of a parameter that this rank owns; never empty.
  struct Segment {
    int parameter = 0;  // in parameters()
    ByteRange flat;     // in the flat buffer
  };

  // A unit with memory for the parameters, which it leaves alone until Adopt.
  // All of one dtype and device, dense, not overlapping (sharding/partition.h
  // sees to that). `first_index` is the index of the first in the model. LOCAL.
  // Returns ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<Unit>> Prepare(
      std::string name, std::vector<NamedParameter> params, int first_index,
      Stage stage, std::shared_ptr<Communicator> comm,
      std::shared_ptr<Residency> residency);
  // Takes the parameters' storages over; whole afterwards where parameters are
  // not sharded, freed otherwise. LOCAL: every rank must hold the same values.
  void Adopt();

  // Makes the unit whole and keeps it so until Unpin. COLLECTIVE where it was
  // freed: an all-gather of S bytes. On an error nothing is pinned.
  absl::Status Pin();
  void Unpin();
  // Frees the unit; false if it is pinned. Units whose parameters are not
  // sharded are never freed (true). LOCAL.
  bool TryFree();

  // Says that values may have been changed through the whole copy. LOCAL.
  void MarkDirty() { dirty_.store(true, std::memory_order_relaxed); }
  // Says that the unit was used without a graph outside of backward: a
  // reentrant checkpoint may bring its gradients late (sharding/gradients.h).
  void MarkUsedWithoutGrad() {
    used_without_grad_.store(true, std::memory_order_relaxed);
  }
  void ClearUsedWithoutGrad() { used_without_grad_ = false; }
  bool used_without_grad() const { return used_without_grad_; }

  // After an owner changed its slice (optimizer, load): the others' copies
  // become it. REQUIRES: freed where parameters are sharded. COLLECTIVE where
  // the unit is whole and its optimizer sharded.
  absl::Status PublishOwned();
  // REQUIRES of PublishOwned and of the optimizer: a unit that is held by a
  // tessera::Use cannot be stepped. FailedPrecondition names the unit.
  absl::Status CheckUpdatable();

  // Gives every parameter plain memory of its own and forgets it. COLLECTIVE.
  absl::Status Release();
  // Takes the parameters' memory away for good: an access names the parameter.
  // For an engine that ends without Release. LOCAL.
  void Abandon();

  const std::string& name() const { return name_; }
  const std::vector<Parameter>& parameters() const { return params_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const FlatLayout& layout() const { return layout_; }
  ByteRange owned() const { return owned_; }
  Stage stage() const { return stage_; }
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  int64_t item_bytes() const { return item_bytes_; }
  Communicator* communicator() const { return comm_.get(); }
  // This rank's own bytes of the parameters, [owned().bytes()].
  char* owned_data();
  // Bytes of parameters held between uses.
  int64_t resident_bytes() const;
  bool whole();
  int pins();

  // The storages, in slot order, for the registry.
  const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& storages() const {
    return storages_;
  }
  // First parameter over this storage.
  const Parameter& ParameterOfSlot(int slot) const;

 private:
  Unit() = default;
  absl::Status Gather() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PointAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::string name_;
  std::vector<Parameter> params_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<std::string> freed_errors_;  // one per slot
  std::vector<Segment> segments_;
  FlatLayout layout_;
  ByteRange owned_;
  Stage stage_;
  at::ScalarType dtype_ = at::kFloat;
  int64_t item_bytes_ = 4;
  at::Device device_{at::kCPU};
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Residency> residency_;

  std::atomic<bool> dirty_{false};
  std::atomic<bool> used_without_grad_{false};
  absl::Mutex mutex_;
  int pins_ ABSL_GUARDED_BY(mutex_) = 0;
  // kReleased: the parameters have memory of their own.
  enum class Life { kOwned, kReleased, kAbandoned };
  Life life_ ABSL_GUARDED_BY(mutex_) = Life::kReleased;
  FlatBuffer shard_;  // [S], where parameters are sharded
  FlatBuffer whole_;  // [P], undefined while freed
};

// Pins of one scope, released at its end.
class PinSet {
 public:
  PinSet() = default;
  PinSet(const PinSet&) = delete;
  PinSet& operator=(const PinSet&) = delete;
  ~PinSet() { Clear(); }
  // Pins once per unit, however often it is added. Throws StatusException.
  void Add(const std::shared_ptr<Unit>& unit);
  void Clear();
  bool empty() const { return units_.empty(); }

 private:
  std::vector<std::shared_ptr<Unit>> units_;
};

}  // namespace tessera
#endif  // SHARDING_UNIT_H_
