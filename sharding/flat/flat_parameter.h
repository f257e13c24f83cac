// FlatParameter ("flat" for short): parameters that are gathered, freed and
// reduced together in one flat buffer of one dtype. Users configure units, and
// messages name them (sharding/partition/partition.h); most units are one flat,
// and a flat has its unit's name, with an addition where there are several
// (sharding/partition/flat_plan.h).
//
//   working  the values that operators compute with
//            (sharding/copy/working_copy.h: whole always, or when used)
//   states   what this rank keeps of the owned elements
//            (offload/shard_states.h). Masters, which the optimizer updates,
//            are in float32 where the working dtype has 16 bits (perhaps as
//            remainders of it), or in whatever the parameters were made in;
//            otherwise they are the working copy itself. Perhaps elsewhere
//            (FlatParameterOptions::states_tier)
//
// A pin keeps the flat whole: every operator pins all its flats before it runs.
// A flat that is not pinned may be freed at any time (sharding/flat/schedule.h
// decides); until then its memory is hidden: an access throws as if it were
// freed.
//
// Invariants: gaps of flat and shard are zero; while freed, the shards of all
// ranks are the only copy; what was written into a working copy goes back to
// its owner's part and master when it is freed or updated, an element of the
// master only where the working copy is no longer its rounded value.
//
// A flat's own collectives stay within the shard group; Reduction goes over the
// replicas too.
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
#include "sharding/flat/schedule.h"
#include "sharding/flat/user_writes.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

// A change of the owned part of a flat parameter, to be published.
struct OwnedChange {
  std::vector<bool> parameters = {};  // which have changed; empty: all
  // This rank's working shard has the masters' values already.
  bool working_written = false;
  // Done when masters and working shard have their new values, which nothing
  // uses before. If it is invalid, the masters have theirs.
  CommFuture updated = {};
};

class FlatParameter final : public FlatDescription,
                            public Gatherable,
                            public std::enable_shared_from_this<FlatParameter> {
 public:
  // Makes a flat with memory for the parameters, which it leaves alone until
  // Adopt. `params`: see FlatDescription; `comm` is the shard group. LOCAL.
  // Returns ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<FlatParameter>> Prepare(
      std::string name, std::vector<NamedParameter> params,
      const FlatParameterOptions& options, std::shared_ptr<Communicator> comm,
      std::shared_ptr<Schedule> schedule);
  // Takes over the parameters' storages, tags the parameters and enters them in
  // the Registry. The flat is freed afterwards where it can be, else whole.
  // Every rank must hold the same values. LOCAL and always OK, except for
  // parameters under construction (sharding/construct/construction.h): these
  // are gathered one by one, COLLECTIVE, and are lost after an error.
  absl::Status Adopt();
  // Gives every parameter plain memory of its own and undoes what Adopt did.
  // COLLECTIVE.
  absl::Status Release();
  // Frees the parameters' memory for good, for an engine that ends without
  // Release: an access is an error that names the parameter. LOCAL.
  void Abandon();

  // Pins the flat and returns true if it is always whole and nothing is
  // arriving. LOCAL; takes no lock.
  bool PinIfReady() {
    if (!ready_) return false;
    ++pins_;
    if (ready_) return true;  // else TryPrepareUpdate has come between
    --pins_;
    return false;
  }
  // Makes the flat whole and keeps it so until Unpin. COLLECTIVE where it was
  // freed and gathers_together(): an all-gather of S elements. On an error
  // nothing is pinned. The schedule must learn of the use first: use
  // sharding/flat/pins.h.
  absl::Status Pin();
  void Unpin();
  int pins() const { return pins_; }

  // ---- For the schedule (Gatherable, sharding/flat/schedule.h).

  int64_t whole_numel() const override { return layout().whole_numel(); }
  // Whether it is whole, or being gathered. (Atomic, so no lock.)
  bool whole() const ABSL_NO_THREAD_SAFETY_ANALYSIS override {
    return copy_->is_whole();
  }
  // COLLECTIVE where Pin is.
  void StartGather(bool ahead) override;
  // Returns true without effect where it cannot be freed. Also returns false,
  // until the next update, if it was written to and others may ask for its
  // shard.
  bool TryFree() override;
  void FreeWhenUnpinned() override;
  void DropSecondary() override;

  // Whether it is gathered and freed, so the schedule must know it.
  bool can_be_freed() const { return traits_.can_be_freed; }
  // Whether ranks wait for each other in its gathers.
  bool gathers_together() const { return traits_.gathers_together; }
  // Whether its uses must be recorded by the schedule.
  bool records_uses() const { return traits_.can_be_freed && !summoned_; }
  Schedule* schedule() const { return schedule_.get(); }

  // Prepares a change of values through the whole copy: where other ranks read
  // it, this rank gets a private one until the next update. REQUIRES: pinned.
  // LOCAL. Returns ResourceExhausted.
  absl::Status PrepareWrite();
  UserWrites& writes() { return writes_; }
  // Calls PlacedWrites::Note (sharding/flat/placed_writes.h). REQUIRES: pinned,
  // PrepareWrite. LOCAL.
  void NotePlacedWrite(int slot, const std::string& op);
  // Returns the placed writes since the last call, for ComparePlacedWrites.
  // LOCAL.
  std::string TakePlacedWrites();
  // Set while the flat was used without a graph outside of backward: a
  // reentrant checkpoint may bring its gradients late
  // (sharding/gradient/gradients.h).
  std::atomic<bool>& used_without_grad() { return used_without_grad_; }

  // Returns FailedPrecondition if a tessera::Use holds the flat: a program that
  // holds one may write at any time, and the write would be lost. LOCAL.
  absl::Status CheckNotHeld() const;
  // Prepares a change of the owned part: waits for an update in progress, frees
  // what can be freed, takes the user's writes into the masters. Errors are
  // CheckNotHeld's, and a disk's. LOCAL.
  absl::Status PrepareUpdate();
  // Prepares a change as PrepareUpdate does, while a backward goes on: calls
  // Block and changes the versions of `parameters`, so that nobody uses new
  // values for old ones. Returns false, without effect, if the flat is pinned.
  // LOCAL.
  absl::StatusOr<bool> TryPrepareUpdate(const std::vector<bool>& parameters);
  // Makes all uses return an error, that the flat is stepped within backward,
  // until Unblock. LOCAL.
  void Block();
  void Unblock();
  // Publishes changed masters (optimizer, load): the working copies of all
  // ranks get their values, and the versions of changed parameters say so: a
  // graph that saved the old values fails in backward, as in libtorch.
  // REQUIRES: PrepareUpdate. COLLECTIVE where every rank has the flat whole and
  // its optimizer is sharded; ASYNC with FlatParameterOptions::overlap. Where
  // the working copy is shared, the caller says when all ranks have written, by
  // AwaitOthers.
  absl::Status PublishOwned(OwnedChange change = {});
  // Delays uses of the flat until `written`, when every rank has changed its
  // part of the shared working copy. LOCAL; does nothing where it is not
  // shared.
  absl::Status AwaitOthers(const CommFuture& written);

  // This rank's slices: the owned elements of masters, working copy, stored
  // gradient and moments. The value (ShardStates::value) has master_dtype()
  // where the flat is trainable or was given masters, else dtype(). REQUIRES,
  // for reading or writing them: PrepareUpdate.
  ShardStates& states() const { return *states_; }
  // Returns the bytes of parameters, masters included, held between uses.
  int64_t resident_bytes() const;
  // Returns the bytes held in addition while it is whole.
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

  // The gather that is on its way, as the trace records it.
  struct TracedGather {
    void End(const std::string& unit, int64_t bytes);
    int64_t begun = 0;  // 0: not recorded
    bool ahead = false;
  };

  FlatParameter(std::string name, std::vector<NamedParameter> params,
                const FlatParameterOptions& options,
                std::shared_ptr<Communicator> comm,
                std::shared_ptr<Schedule> schedule);
  absl::Status TakeStorages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AwaitArrival() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LaunchGather(bool ahead) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropMemory(Life life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetStepped(absl::string_view how) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<Schedule> schedule_;
  UserWrites writes_;
  std::atomic<bool> used_without_grad_{false};
  // Held by a Summoning. Its uses are not recorded, since that may be so on
  // rank 0 only, and all ranks must gather the same.
  std::atomic<bool> summoned_{false};
  // Read without the lock, and changed with it unless the flat is never freed.
  std::atomic<int> pins_{0};
  // The flat is never freed, nothing is arriving, and streams need no ordering:
  // a pin only counts.
  std::atomic<bool> ready_{false};

  mutable absl::Mutex mutex_;
  // Set by Prepare, never changed.
  std::unique_ptr<ShardStates> states_;
  std::unique_ptr<WorkingCopy> copy_ ABSL_PT_GUARDED_BY(mutex_);
  WorkingCopy::Traits traits_;  // of copy_
  FlatStorages storages_ ABSL_GUARDED_BY(mutex_);
  StreamUses uses_ ABSL_GUARDED_BY(mutex_);  // of the whole copy
  Life life_ ABSL_GUARDED_BY(mutex_) = Life::kReleased;
  bool free_when_unpinned_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);   // to be gathered
  absl::Status blocked_ ABSL_GUARDED_BY(mutex_);  // Summoning::BeginElsewhere
  absl::Status stepped_ ABSL_GUARDED_BY(mutex_);  // from Block until Unblock
  TracedGather traced_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_FLAT_FLAT_PARAMETER_H_
