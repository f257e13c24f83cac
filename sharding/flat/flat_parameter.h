// FlatParameter ("flat" for short): parameters that are gathered, freed and
// reduced together: one flat buffer of one dtype. What users configure and what
// messages name is the unit (sharding/partition/partition.h); most units are
// one flat, and a flat has its unit's name, with more words where there are
// several (sharding/partition/flat_plan.h).
//
//   working  the values that operators compute with
//            (sharding/copy/working_copy.h: whole always, or when used)
//   states   what this rank keeps of the owned elements
//            (offload/shard_states.h). Masters, which the optimizer updates,
//            are in float32 where the working dtype has 16 bits, or in whatever
//            the parameters were made in; otherwise they are the working copy
//            itself. Perhaps elsewhere (FlatParameterOptions::states)
//
// A pin keeps the flat whole: every operator pins all its flats before it runs.
// What can be freed may be so at any time while it is not pinned
// (sharding/flat/schedule.h decides); until then its memory is hidden: an
// access throws as if it were freed.
//
// Invariants: gaps of flat and shard are zero; while freed, the shards of all
// ranks are the only copy; what was written into a working copy goes back to
// its owner's part and master when it is freed or updated, an element of the
// master only where the working copy is no longer its rounded value.
//
// A flat's own collectives stay within the shard group; SumOverRanks goes over
// the replicas too.
//
// Threads: all methods may be called from any thread, and on any stream of the
// flat's device: a pin is for the stream that is current when it begins.
#ifndef SHARDING_FLAT_FLAT_PARAMETER_H_
#define SHARDING_FLAT_FLAT_PARAMETER_H_

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
#include "base/stream/stream_uses.h"
#include "comm/communicator.h"
#include "offload/shard_states.h"
#include "sharding/copy/flat_description.h"
#include "sharding/copy/working_copy.h"
#include "sharding/flat/flat_storages.h"
#include "sharding/flat/gather_trace.h"
#include "sharding/flat/schedule.h"
#include "sharding/flat/user_writes.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

class FlatParameter final : public FlatDescription,
                            public Gatherable,
                            public std::enable_shared_from_this<FlatParameter> {
 public:
  // A flat with memory for the parameters, which it leaves alone until Adopt.
  // `params` as FlatDescription's; `comm` is the shard group. LOCAL. Returns
  // ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<FlatParameter>> Prepare(
      std::string name, std::vector<NamedParameter> params,
      const FlatParameterOptions& options, std::shared_ptr<Communicator> comm,
      std::shared_ptr<Schedule> schedule);
  // Takes the parameters' storages over, tags the parameters and enters them in
  // the Registry; freed afterwards where it can be, else whole. Every rank must
  // hold the same values. LOCAL, and OK, except for parameters under
  // construction (sharding/construct/construction.h): these are gathered one by
  // one, COLLECTIVE, and after an error are lost.
  absl::Status Adopt();
  // Gives every parameter plain memory of its own and undoes what Adopt did.
  // COLLECTIVE.
  absl::Status Release();
  // Takes the parameters' memory away for good: an access names the parameter.
  // For an engine that ends without Release. LOCAL.
  void Abandon();

  // Pins the flat if it is always whole and nothing is on its way. LOCAL, and
  // costs no lock.
  bool PinIfReady() {
    if (!ready_) return false;
    ++pins_;
    return true;
  }
  // Makes the flat whole and keeps it so until Unpin. COLLECTIVE where it was
  // freed and gathers_together(): an all-gather of S elements. On an error
  // nothing is pinned. The schedule is told before: use sharding/flat/pins.h.
  absl::Status Pin();
  void Unpin();
  int pins() const { return pins_; }

  // ---- For the schedule (Gatherable, sharding/flat/schedule.h).

  int64_t whole_numel() const override { return layout().whole_numel(); }
  // Whole, or on its way to be. (Atomic, so no lock.)
  bool whole() const ABSL_NO_THREAD_SAFETY_ANALYSIS override {
    return copy_->is_whole();
  }
  // COLLECTIVE as Pin.
  void StartGather(bool ahead) override;
  // Nothing, and true, where it cannot be freed. False, too, if it was written
  // to and others may ask for its shard, until the next update.
  bool TryFree() override;
  void FreeWhenUnpinned() override;
  void DropSecondary() override;

  // Is gathered and freed: the schedule is to know it.
  bool can_be_freed() const { return traits_.can_be_freed; }
  // Ranks wait for each other in its gathers.
  bool gathers_together() const { return traits_.gathers_together; }
  // Its uses are to be told to the schedule.
  bool records_uses() const { return traits_.can_be_freed && !summoned_; }
  Schedule* schedule() const { return schedule_.get(); }

  // Values are about to be changed through the whole copy: where others read
  // it, this rank gets one of its own until the next update. REQUIRES: pinned.
  // LOCAL. Returns ResourceExhausted.
  absl::Status PrepareWrite();
  UserWrites& writes() { return writes_; }
  // PlacedWrites::Note (sharding/flat/placed_writes.h). REQUIRES: pinned,
  // PrepareWrite. LOCAL.
  void NotePlacedWrite(int slot, const std::string& op);
  // What was written so since the last call, for ComparePlacedWrites. LOCAL.
  std::string TakePlacedWrites();
  // Set while the flat was used without a graph outside of backward: a
  // reentrant checkpoint may bring its gradients late
  // (sharding/gradient/gradients.h).
  std::atomic<bool>& used_without_grad() { return used_without_grad_; }

  // FailedPrecondition if a tessera::Use holds the flat. LOCAL.
  absl::Status CheckUpdatable();
  // Before an owner changes its part: waits for an update that goes on, frees
  // what can be freed, takes writes of the user into the masters. Errors as
  // CheckUpdatable, and a disk's. LOCAL.
  absl::Status PrepareUpdate();
  // After an owner changed its masters (optimizer, load): the working copies of
  // all ranks become them. REQUIRES: PrepareUpdate. COLLECTIVE where every rank
  // has the flat whole and its optimizer is sharded; ASYNC with
  // FlatParameterOptions::overlap. Where the working copy is shared, the caller
  // says when all have written: AwaitOthers. `working_written`: this rank's
  // working shard holds the masters already. `updated`: done when masters and
  // working shard have their new values; nothing uses these before.
  absl::Status PublishOwned(bool working_written = false,
                            CommFuture updated = {});
  // The flat is not used before `written`: every rank has changed its part of
  // the shared working copy. LOCAL; nothing where it is not shared.
  absl::Status AwaitOthers(const CommFuture& written);

  // This rank's slices: the owned elements of masters, working copy, stored
  // gradient and moments. The value (ShardStates::value) is of master_dtype()
  // where the flat is trainable or has been given masters, else of dtype().
  // REQUIRES for reading or writing them: PrepareUpdate.
  ShardStates& states() const { return *states_; }
  // Bytes of memory of parameters, masters included, held between uses.
  int64_t resident_bytes() const;
  // And besides, while it is whole.
  int64_t gathered_bytes() const;
  // The storages, in slot order; the same from Adopt on.
  const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& storages() const
      ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return storages_.all();
  }

 private:
  friend class Summoning;  // sharding/flat/summoning.h

  // kReleased: the parameters have memory of their own.
  enum class Life { kOwned, kReleased, kAbandoned };

  FlatParameter(std::string name, std::vector<NamedParameter> params,
                const FlatParameterOptions& options,
                std::shared_ptr<Communicator> comm,
                std::shared_ptr<Schedule> schedule);
  absl::Status TakeStorages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Gather() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LaunchGather(bool ahead) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotHeld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropMemory(Life life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<Schedule> schedule_;
  UserWrites writes_;
  std::atomic<bool> used_without_grad_{false};
  // Held by a Summoning: on rank 0 alone perhaps, so its uses are not recorded,
  // since all ranks must gather the same.
  std::atomic<bool> summoned_{false};
  // Read without the lock, changed with it, except where the flat is never
  // freed.
  std::atomic<int> pins_{0};
  // Is never freed, nothing is on its way, and no stream has to be told of: a
  // pin only counts.
  std::atomic<bool> ready_{false};

  mutable absl::Mutex mutex_;
  // Set by Prepare, for good.
  std::unique_ptr<ShardStates> states_;
  std::unique_ptr<WorkingCopy> copy_ ABSL_PT_GUARDED_BY(mutex_);
  WorkingCopy::Traits traits_;  // of copy_
  FlatStorages storages_ ABSL_GUARDED_BY(mutex_);
  StreamUses uses_ ABSL_GUARDED_BY(mutex_);           // of the whole copy
  absl::Status not_written_ ABSL_GUARDED_BY(mutex_);  // back to the masters
  Life life_ ABSL_GUARDED_BY(mutex_) = Life::kReleased;
  bool free_when_unpinned_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);   // to be gathered
  absl::Status blocked_ ABSL_GUARDED_BY(mutex_);  // Summoning::BeginElsewhere
  GatherTrace gather_trace_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_FLAT_FLAT_PARAMETER_H_
