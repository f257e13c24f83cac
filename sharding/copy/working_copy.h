// WorkingCopy: the values that operators compute with, and the way in which
// they exist on this rank. One strategy for each way:
//
//   ReplicatedCopy  whole on every rank, always (stages 0 to 2, and what
//                   persists at stage 3)
//   GatheredCopy    a shard, perhaps on a disk; whole for as long as it is
//   used,
//                   by an all-gather (stage 3)
//   ServedCopy      the same, but each rank reads the others' shards when it
//                   needs them (one-sided gathers)
//   LoneCopy        the shard itself, of a rank that is alone; counts as freed
//                   between its uses
//   SharedCopy      whole, always, in memory that the ranks of a host share
//
// Only the strategy knows what memory there is; FlatParameter knows when a copy
// is needed, written to, published and freed, and to whom it may be shown. A
// new way is one more class here and one line in Make.
//
// Threads: outside order (FlatParameter's mutex), except for traits and
// is_whole.
#ifndef SHARDING_COPY_WORKING_COPY_H_
#define SHARDING_COPY_WORKING_COPY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "comm/communicator.h"
#include "offload/shard_states.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

class WorkingCopy {
 public:
  // What a strategy is, for as long as it lives.
  struct Traits {
    // Gathered for its uses and freed after them; else it is always whole.
    bool can_be_freed = false;
    // Ranks wait for each other in its gathers.
    bool gathers_together = false;
    // Operators read memory that others write to (Await), and that a user's
    // write needs a copy of (PrepareWrite).
    bool shared = false;
    // A forward leaves something for the backward (DropSecondary).
    bool keeps_secondary = false;
    // After an update the other ranks' parts have to be fetched (Publish).
    bool publishes = false;
    // Elements held between uses of what cannot be freed.
    int64_t resident_numel = 0;
  };

  // The strategy that the options ask for, with the memory that it holds
  // between uses; this rank's part of it becomes ShardStates::kWorking of
  // `states`. `flat` and `states` outlive it, and so does `live`, which counts
  // the elements that are whole and can be freed. LOCAL. ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<WorkingCopy>> Make(
      const FlatDescription* flat, ShardStates* states,
      std::atomic<int64_t>* live);
  virtual ~WorkingCopy() = default;
  WorkingCopy(const WorkingCopy&) = delete;
  WorkingCopy& operator=(const WorkingCopy&) = delete;

  const Traits& traits() const { return traits_; }
  // Whole, or on its way to be.
  bool is_whole() const { return is_whole_; }
  // [P]; undefined while freed. What lies there counts when nothing is on its
  // way to it.
  const FlatBuffer& whole() const { return whole_; }

  // The values of one storage, of any dtype: keeps its part of them. REQUIRES:
  // the working shard is in memory. LOCAL.
  virtual void Take(Range slot, const at::Tensor& values);
  // All values have been taken: others may read what they need. LOCAL.
  virtual void Offer() {}
  // All memory goes, for good. REQUIRES: nothing is on its way. LOCAL.
  virtual void Drop();

  // Starts to make it whole; Settle waits. REQUIRES: !is_whole(). COLLECTIVE
  // where it gathers together, ASYNC. On an error it is freed as before.
  virtual absl::Status StartGather() { return absl::OkStatus(); }
  bool arriving() const { return arriving_.has_value(); }
  // What is on its way has come. An error leaves it freed; where it cannot be
  // freed, every later Settle returns the error again.
  virtual absl::Status Settle();
  // Others may still ask for what a user's write would change: not to be freed.
  virtual bool MustStay(bool /*written*/) const { return false; }
  // Back to what is held between uses: frees the whole copy, or this rank's own
  // one of shared memory. The working shard has what is to be kept. LOCAL.
  virtual void Free() {}
  virtual void DropSecondary() {}

  // The working shard has been updated, or is from the end of `updated` on, if
  // that is valid: it is not read before. Starts to fetch the others' parts.
  // COLLECTIVE where the traits say `publishes`, ASYNC.
  virtual void Publish(CommFuture updated) = 0;
  // Not to be used before `written`, when all ranks have written their part of
  // shared memory; false if none of that is used. LOCAL.
  virtual bool Await(const CommFuture& /*written*/) { return false; }

  // whole() is about to be written to. LOCAL. ResourceExhausted.
  virtual absl::Status PrepareWrite() { return absl::OkStatus(); }

  // ---- For writes that may be taken back (sharding/flat/summoning.h).

  // Before the first write. LOCAL. ResourceExhausted.
  virtual absl::Status Save() { return absl::OkStatus(); }
  // The values of before are back, or will be when it is freed. LOCAL.
  virtual void Restore() {}
  // What Save kept is not needed. LOCAL.
  virtual void DropSaved() {}
  // whole() is memory for values that come from another rank. LOCAL.
  // ResourceExhausted.
  virtual absl::Status PrepareReceive() { return absl::OkStatus(); }

 protected:
  WorkingCopy(const FlatDescription* flat, ShardStates* states, Traits traits)
      : flat_(*flat), states_(*states), traits_(traits) {}

  void SetWhole(FlatBuffer whole);
  absl::StatusOr<FlatBuffer> Allocate(int64_t numel, MemoryKind kind,
                                      Fill fill) const;
  // Save and Restore of copies whose values are nowhere else.
  absl::Status SaveWhole();
  void RestoreWhole();

  TieredBuffer& shard() const { return states_.At(ShardStates::kWorking); }

  const FlatDescription& flat_;
  ShardStates& states_;
  const Traits traits_;
  std::optional<CommFuture> arriving_;
  FlatBuffer saved_;  // [P]: what RestoreWhole gives back

 private:
  FlatBuffer whole_;
  std::atomic<bool> is_whole_{false};
};

}  // namespace tessera
#endif  // SHARDING_COPY_WORKING_COPY_H_
