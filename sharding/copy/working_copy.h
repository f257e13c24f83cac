// WorkingCopy: the values that operators compute with, and how they exist on
// this rank. There is one strategy for each way:
//
//   ReplicatedCopy  whole on every rank, always (stages 0 to 2, and what
//                   persists at stage 3)
//   GatheredCopy    a shard, perhaps on a disk; made whole by an all-gather for
//                   as long as it is used (stage 3)
//   ServedCopy      a shard; made whole by reading the others' shards when the
//                   rank needs them (one-sided gathers)
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
  // Constant properties of a strategy.
  struct Traits {
    // The copy is gathered for its uses and freed after them; else it is always
    // whole.
    bool can_be_freed = false;
    // Ranks wait for each other in its gathers.
    bool gathers_together = false;
    // Operators read memory that other ranks write to (Await); a user's write
    // needs a private copy (PrepareWrite).
    bool shared = false;
    // A forward leaves something for the backward (DropSecondary).
    bool keeps_secondary = false;
    // After an update the other ranks' parts have to be fetched (Publish).
    bool publishes = false;
    // Elements that a copy which cannot be freed holds between uses.
    int64_t resident_numel = 0;
  };

  // Makes the strategy that the options ask for, with the memory that it holds
  // between uses; this rank's part becomes ShardStates::kWorking of `states`.
  // `flat`, `states` and `live`, which counts the whole elements that can be
  // freed, outlive it. LOCAL. ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<WorkingCopy>> Make(
      const FlatDescription* flat, ShardStates* states,
      std::atomic<int64_t>* live);
  virtual ~WorkingCopy() = default;
  WorkingCopy(const WorkingCopy&) = delete;
  WorkingCopy& operator=(const WorkingCopy&) = delete;

  const Traits& traits() const { return traits_; }
  // Whether it is whole, or being gathered.
  bool is_whole() const { return is_whole_; }
  // The whole copy, [P]; undefined while freed. Its values are valid when
  // nothing is arriving.
  const FlatBuffer& whole() const { return whole_; }

  // Takes the values of one storage, of any dtype, and keeps its part of them.
  // REQUIRES: the working shard is in memory. LOCAL.
  virtual void Take(Range slot, const at::Tensor& values);
  // Lets other ranks read what they need: all values have been taken. LOCAL.
  virtual void Offer() {}
  // Frees all memory for good. REQUIRES: nothing is arriving. LOCAL.
  virtual void Drop();

  // Starts to make it whole; AwaitArrival waits. REQUIRES: !is_whole().
  // COLLECTIVE where it gathers together, ASYNC. On an error it is freed as
  // before.
  virtual absl::Status StartGather() { return absl::OkStatus(); }
  bool arriving() const { return arriving_.has_value(); }
  // Waits for what is arriving. An error leaves the copy freed; where it cannot
  // be freed, every later AwaitArrival returns the error again.
  virtual absl::Status AwaitArrival();
  // Whether it must not be freed, since others may still ask for what a user's
  // write would change.
  virtual bool MustStay(bool /*written*/) const { return false; }
  // Frees the whole copy, or this rank's private copy of shared memory. The
  // working shard already has what is to be kept. LOCAL.
  virtual void Free() {}
  virtual void DropSecondary() {}

  // Starts to fetch the others' parts after an update. The working shard has
  // its new values, or will have them when `updated` is done, if that is valid:
  // it is not read before. COLLECTIVE where the traits say `publishes`, ASYNC.
  virtual void Publish(CommFuture updated) = 0;
  // Delays uses until `written`, when all ranks have written their part of
  // shared memory; returns false if the copy is not in shared memory. LOCAL.
  virtual bool Await(const CommFuture& /*written*/) { return false; }

  // Prepares whole() to be written to. LOCAL. ResourceExhausted.
  virtual absl::Status PrepareWrite() { return absl::OkStatus(); }

  // ---- For writes that may be taken back (sharding/flat/summoning.h).

  // Saves the values before the first write. LOCAL. ResourceExhausted.
  virtual absl::Status Save() { return absl::OkStatus(); }
  // Restores the saved values, at once or when the copy is freed. LOCAL.
  virtual void Restore() {}
  // Drops what Save kept. LOCAL.
  virtual void DropSaved() {}
  // Makes whole() memory for values from another rank. LOCAL.
  // ResourceExhausted.
  virtual absl::Status PrepareReceive() { return absl::OkStatus(); }

 protected:
  WorkingCopy(const FlatDescription* flat, ShardStates* states, Traits traits)
      : flat_(*flat), states_(*states), traits_(traits) {}

  void SetWhole(FlatBuffer whole);
  absl::StatusOr<FlatBuffer> Allocate(int64_t numel, MemoryKind kind,
                                      Fill fill) const;
  // Save and Restore for copies whose values are nowhere else.
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
