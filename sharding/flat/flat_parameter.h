// FlatParameter: parameters that are gathered, freed and reduced together: one
// flat buffer of one dtype.
//
//   flat     [ w1 ..| b1 .| w2 ....|....]   P elements
//   (sharding/layout/layout.h) owned    flat[r*S, (r+1)*S)             what
//   this rank's optimizer updates
//                                           (all of flat where states are
//                                           whole)
//   working  the values that operators compute with
//   master   the values that the optimizer updates: the owned elements in
//            float32 where the working dtype has 16 bits, or whatever the
//            parameters were made in; otherwise the working copy itself
//
// Every parameter keeps its own TensorImpl, sizes, strides and StorageImpl;
// only the StorageImpl's pointer is moved into the flat buffer while the unit
// is whole, and taken away while it is freed. Parameters that share a storage
// go on sharing it. Where the working dtype is another than the parameters'
// was, they get new StorageImpls until Release, and an alias of the old ones
// throws.
//
// A pin keeps the unit whole: every operator pins all its units before it runs.
// What is not pinned may be freed at any time (sharding/flat/schedule.h
// decides); until then its memory is hidden: an access throws as if it were
// freed.
//
// Where the ranks share a host's memory, the working copy may be one for all of
// them (FlatParameterOptions::shared): operators read it through a mapping that
// cannot be written to, the engine writes its owned part through another.
// Owners write between two points that all ranks come to: after every rank has
// entered the update, and before any rank uses a unit again. A user's write
// goes to a copy of this rank's own, whose owned part is taken over at the next
// update.
//
// Invariants: gaps of flat and shard are zero; while freed, the shards of all
// ranks are the only copy; a dirty unit's own slice goes back to its shard and
// its master when it is freed, an element of the master only where the working
// copy is no longer its rounded value.
//
// W, r and "all ranks" are those of the unit's communicator, the shard group:
// all ranks, or a part of them, of which there are replicas then
// (FlatParameterOptions::replicas). A unit's own collectives stay within the
// shard group; SumOverRanks goes over the replicas too.
//
// Threads: all methods may be called from any thread.
#ifndef SHARDING_FLAT_FLAT_PARAMETER_H_
#define SHARDING_FLAT_FLAT_PARAMETER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "sharding/flat/served_gathers.h"
#include "sharding/layout/flat_buffer.h"
#include "sharding/layout/layout.h"
#include "sharding/layout/named_parameter.h"
#include "sharding/torch/write_faults.h"

namespace tessera {

class Schedule;  // sharding/flat/schedule.h

// The three booleans that a ZeRO stage is.
struct Stage {
  bool sharded_optimizer = false;
  bool sharded_gradients = false;
  bool sharded_parameters = false;
  static Stage Of(int stage) { return {stage >= 1, stage >= 2, stage >= 3}; }
};

struct FlatParameterOptions {
  Stage stage;
  // Working dtype; the parameters' own if absent. Not for complex ones.
  std::optional<at::ScalarType> dtype;
  // Of sums over ranks; the working one if absent.
  std::optional<at::ScalarType> reduce_dtype;
  // Has a master and an optimizer state from the start.
  bool trainable = true;
  // What the optimizer changed reaches the other ranks while the program goes
  // on (stages 1 and 2); the first use waits.
  bool overlap = true;
  // Operators cast other tensors to the parameters' dtype
  // (sharding/dispatch/cast_inputs.h).
  bool cast_inputs = false;
  // Debugging: keeps a fingerprint of what was written (TakeWritten).
  bool check_writes = false;
  // The ranks that own the same part of the unit in other shard groups, in the
  // order of these: PyTorch's HSDP. Null: there is one shard group.
  std::shared_ptr<Communicator> replicas;
  // A group of n neighbouring ranks, n a divisor of the world size: a unit that
  // is freed after its forward leaves P / n elements with each of them, from
  // which its backward gathers. FSDP2's reshard_after_forward = n, DeepSpeed's
  // hpZ.
  std::shared_ptr<Communicator> reshard_group;
  // Memory for the working copy that all ranks see, each owner writing its part
  // of it, and where it begins there: the unit is never gathered, and `stage`
  // does not shard parameters. Null: memory of its own.
  std::shared_ptr<SharedMemory> shared;
  int64_t shared_offset = 0;  // bytes
  // Gathers are no collectives: each rank reads the others' shards; this unit's
  // are `served_key`. Null: they are. Not with reshard_group.
  std::shared_ptr<ServedGathers> served;
  int64_t served_key = 0;
};

// Where the storages of these parameters lie in the flat buffer of a unit.
FlatLayout LayoutOf(const std::vector<NamedParameter>& parameters,
                    int world_size);
// What its operators compute with; of elements, never complex.
at::ScalarType WorkingDtypeOf(const std::vector<NamedParameter>& parameters,
                              const FlatParameterOptions& options);

class FlatParameter {
 public:
  struct Parameter {
    at::Tensor tensor;  // the module's own
    std::string name;
    int index = 0;  // in the model, over all units
    int slot = 0;   // its storage in the unit
    Range range;    // its elements in the flat buffer, dense
    // Where its first element lies in its storage, in elements.
    int64_t storage_offset = 0;
  };
  // The part of a parameter that this rank owns; never empty.
  struct Segment {
    int parameter = 0;  // in parameters()
    Range range;        // in the flat buffer
  };

  // A unit with memory for the parameters, which it leaves alone until Adopt.
  // All of one dtype and device, dense, not overlapping
  // (sharding/layout/partition.h sees to that). `comm` is the shard group.
  // LOCAL. Returns ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<FlatParameter>> Prepare(
      std::string name, std::vector<NamedParameter> params,
      const FlatParameterOptions& options, std::shared_ptr<Communicator> comm,
      std::shared_ptr<Schedule> schedule);
  // Takes the parameters' storages over; whole afterwards where parameters are
  // not sharded, freed otherwise. Every rank must hold the same values. LOCAL,
  // and OK, but for parameters under construction
  // (sharding/construct/construction.h): these are gathered one by one,
  // COLLECTIVE, and after an error are lost.
  absl::Status Adopt();

  // Makes the unit whole and keeps it so until Unpin. COLLECTIVE where it was
  // freed and gathers are not served: an all-gather of S elements. On an error
  // nothing is pinned.
  absl::Status Pin();
  void Unpin();
  // Starts the gather of a freed unit, for Pin to wait for. COLLECTIVE as Pin,
  // ASYNC; nothing if it is whole. An error is Pin's.
  void StartGather();
  // Frees the unit; false if it is pinned, or if it was written to and gathers
  // are served: until the next update others may read the shard. Units whose
  // parameters are not sharded are never freed (true). LOCAL.
  bool TryFree();
  // The same, now or when the last pin goes.
  void FreeWhenUnpinned();
  // Forgets what reshard_group holds. LOCAL.
  void DropSecondary();

  // Values are about to be changed through the whole copy: where it is shared,
  // the unit gets one of its own until the next update. REQUIRES: pinned.
  // LOCAL. Returns ResourceExhausted.
  absl::Status PrepareWrite();
  // Says that the unit was used without a graph outside of backward: a
  // reentrant checkpoint may bring its gradients late
  // (sharding/gradient/gradients.h).
  void MarkUsedWithoutGrad() {
    used_without_grad_.store(true, std::memory_order_relaxed);
  }
  void ClearUsedWithoutGrad() { used_without_grad_ = false; }
  bool used_without_grad() const { return used_without_grad_; }

  // FailedPrecondition if a tessera::Use holds the unit. LOCAL.
  absl::Status CheckUpdatable();
  // Before an owner changes its slice: frees what is sharded, takes writes of
  // the user into the masters. Errors as CheckUpdatable. LOCAL.
  absl::Status PrepareUpdate();
  // After an owner changed its masters (optimizer, load): the working copies of
  // all ranks become them. REQUIRES: PrepareUpdate. COLLECTIVE where the unit
  // is whole and its optimizer sharded; ASYNC with
  // FlatParameterOptions::overlap. Where the working copy is shared, the caller
  // says when all have written: AwaitOthers. `working_written`: this rank's
  // separate_working() holds the masters already.
  absl::Status PublishOwned(bool working_written = false);
  // The unit is not used before `written`: every rank has changed its part of
  // the shared working copy. LOCAL; nothing where it is not shared.
  absl::Status AwaitOthers(const CommFuture& written);
  // With check_writes: a fingerprint of the values written since the last call,
  // 0 if none; the same on ranks that wrote the same. LOCAL.
  uint64_t TakeWritten();
  // A write of the user's has been taken over since the last call. LOCAL.
  bool TakeWrittenTo() { return written_to_.exchange(false); }

  // ---- for Engine::Summon (engine/engine_summon.cc): units that are held
  // whole, written to by any means, and written back or not. REQUIRES:
  // PrepareUpdate before, so that nothing else was written. ----

  // Pins the unit and lets it be written to. COLLECTIVE as Pin. On an error
  // nothing is held.
  absl::Status BeginSummon();
  // `rank` alone will hold it: takes part in the gather that it needs, if it
  // needs others; the unit cannot be pinned here then. COLLECTIVE as Pin.
  absl::Status SummonElsewhere(int rank);
  // FailedPrecondition if somebody else holds it, too. LOCAL.
  absl::Status CheckSummonedOnly();
  // Where another rank held it: memory for BroadcastWritten, and that nobody
  // holds the unit. LOCAL. ResourceExhausted, FailedPrecondition.
  absl::Status PrepareReceive();
  // After PrepareReceive, if BroadcastWritten is not to be. LOCAL.
  void DropReceived();
  // `root`'s values become those of all ranks of all shard groups, by which
  // `root` is numbered, as if all had written them: for the next update to
  // take. COLLECTIVE. An error is the group's end.
  absl::Status BroadcastWritten(int root);
  // Ends what BeginSummon began; the next update takes what was written, or the
  // values are those of before. LOCAL.
  void EndSummon(bool keep_writes);
  // The same for SummonElsewhere.
  void EndSummonElsewhere();

  // Gives every parameter plain memory of its own and forgets it. COLLECTIVE.
  absl::Status Release();
  // Takes the parameters' memory away for good: an access names the parameter.
  // For an engine that ends without Release. LOCAL.
  void Abandon();

  const std::string& name() const { return name_; }
  const std::vector<Parameter>& parameters() const { return params_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const FlatLayout& layout() const { return layout_; }
  Range owned() const { return owned_; }
  Stage stage() const { return options_.stage; }
  bool trainable() const { return options_.trainable; }
  bool cast_inputs() const { return options_.cast_inputs; }
  at::ScalarType dtype() const { return dtype_; }  // of elements: never complex
  at::ScalarType master_dtype() const { return master_dtype_; }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  at::Device device() const { return device_; }
  // Ranks wait for each other in its gathers.
  bool gathers_together() const {
    return options_.stage.sharded_parameters && options_.served == nullptr;
  }
  Communicator* communicator() const { return comm_.get(); }  // shard group
  Communicator* replicas() const { return options_.replicas.get(); }
  // This rank's masters, [owned().numel()]; of master_dtype() where the unit is
  // trainable or has had MakeMasters, else of dtype().
  at::Tensor masters();
  // This rank's part of the working copy, of dtype(), where masters() is
  // another; else undefined. For who changes the masters and writes both at
  // once. REQUIRES: PrepareUpdate, before writing.
  at::Tensor separate_working();
  // For a unit whose parameters were unfrozen. LOCAL. ResourceExhausted.
  absl::Status MakeMasters();
  // Back to the state before that. LOCAL.
  void DropMasters();
  // Bytes of parameters, masters included, held between uses.
  int64_t resident_bytes() const;
  // Whole, or on its way to be.
  bool whole() const { return is_whole_; }
  int pins() const { return pins_; }

  // The storages, in slot order, for the registry.
  const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& storages() const {
    return storages_;
  }
  // First parameter over this storage.
  const Parameter& ParameterOfSlot(int slot) const;

 private:
  // kReleased: the parameters have memory of their own.
  enum class Life { kOwned, kReleased, kAbandoned };

  explicit FlatParameter(const FlatParameterOptions& options)
      : options_(options) {}
  void LayOut(std::vector<NamedParameter> params);
  void TakeValues(int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Allocate();
  bool needs_masters() const { return master_dtype_ != dtype_; }
  void Convert() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AllocateWhole() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Launch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Gather() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepSecondary() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetWhole(FlatBuffer whole) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PointAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HideAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ShowAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GiveBack();
  absl::StatusOr<FlatBuffer> GatherMasters()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveMemory(const at::Tensor& values);
  bool shared() const { return options_.shared != nullptr; }
  bool must_stay() const { return options_.served != nullptr && dirty_; }
  absl::Status AllocateShared() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropPrivate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PrepareSummoned();
  void TakeBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotHeld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropMemory(Life life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  at::Tensor OwnedWorking();
  bool converted() const { return !originals_.empty(); }

  const FlatParameterOptions options_;
  std::string name_;
  std::vector<Parameter> params_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
  // What the parameters lay in before, where their dtype was changed.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> originals_;
  std::vector<at::ScalarType> original_dtypes_;  // one per slot
  std::vector<std::string> freed_errors_;        // one per slot
  std::vector<Segment> segments_;
  FlatLayout layout_;
  Range owned_;
  at::ScalarType dtype_ = at::kFloat;
  at::ScalarType master_dtype_ = at::kFloat;
  at::ScalarType reduce_dtype_ = at::kFloat;
  at::Device device_{at::kCPU};
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Schedule> schedule_;

  std::atomic<bool> dirty_{false};
  std::atomic<bool> written_to_{false};
  std::atomic<bool> used_without_grad_{false};
  // Held by BeginSummon: on rank 0 alone perhaps, so its uses are not recorded,
  // as ranks must gather alike.
  std::atomic<bool> summoned_{false};
  // Read without the lock, changed with it; but pins_, where parameters are
  // not sharded, without.
  std::atomic<bool> is_whole_{false};
  std::atomic<int> pins_{0};
  // Parameters are not sharded, and nothing is on its way: a pin only counts.
  std::atomic<bool> ready_{false};
  absl::Mutex mutex_;
  bool free_when_unpinned_ ABSL_GUARDED_BY(mutex_) = false;
  Life life_ ABSL_GUARDED_BY(mutex_) = Life::kReleased;
  // A gather or a publication on its way; the parameters are hidden till then.
  std::optional<CommFuture> arriving_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);   // to be launched
  absl::Status blocked_ ABSL_GUARDED_BY(mutex_);  // SummonElsewhere
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  FlatBuffer master_;  // [owned], where it is not the working copy
  // [S] working, where parameters are sharded or the working copy is shared:
  // then the owned part of that, to be written.
  FlatBuffer shard_;
  // [P / n] working; holds values from the end of a forward to the next border.
  FlatBuffer secondary_;
  bool secondary_holds_ = false;
  FlatBuffer whole_;  // [P] working, undefined while freed
  FlatBuffer saved_;  // [P] working: what EndSummon gives back
  // A shared unit has been written to: whole_ is memory of its own.
  bool private_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<WriteFaults> write_faults_;
};

// Pins of one scope, released at its end.
class PinSet {
 public:
  PinSet() = default;
  PinSet(const PinSet&) = delete;
  PinSet& operator=(const PinSet&) = delete;
  ~PinSet() { Clear(); }
  // Pins once per unit, however often it is added. Throws StatusException.
  void Add(const std::shared_ptr<FlatParameter>& flat);
  void Clear();
  bool empty() const { return flats_.empty(); }

 private:
  absl::InlinedVector<std::shared_ptr<FlatParameter>, 2> flats_;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_FLAT_PARAMETER_H_
