// ShardStates: a table of what a rank keeps of one flat parameter from step to
// step: its slices [owned], each in a format of its own
// (offload/element_format.h) and in a tier of its own
// (offload/tiered_buffer.h).
//
//   masters         what the optimizer updates, where the working shard is not
//                   that itself; or their remainders: the halves of masters
//                   whose other halves are the working shard
//                   (offload/remainders.h)
//   working         this rank's shard of the values that operators compute with
//   gradient        the step's gradient, where it is stored elsewhere
//   new values      what is on its way from the host to a working shard on a
//                   device
//   training point  masters of before, while averages are in their place
//   moment k        the optimizer's states, and the average of masters last
//
// Each state exists or does not. States that a step writes can get room for
// their next values besides (MakeRoomForNext), for early steps.
//
// The table also knows when masters and the working shard have their values: in
// the order of a device's streams (Order), and after an update in the
// background (SetUpdated).
//
// Errors are those of TieredBuffer and UpdateStream.
//
// Threads: Order, SetChanged, SetUpdated, updated and the Await methods may be
// called from any; the caller orders the other calls.
#ifndef OFFLOAD_SHARD_STATES_H_
#define OFFLOAD_SHARD_STATES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/layout/flat_buffer.h"
#include "base/stream/stream_point.h"
#include "comm/communicator.h"
#include "offload/tiered_buffer.h"

namespace tessera {

class UpdateStream;  // offload/update_stream.h
class RaisedValue;

class ShardStates {
 public:
  // Moment k is kMoments + k.
  enum State : int {
    kMasters,
    kWorking,
    kGradient,
    kNewValues,
    kTrainingPoint,
    kMoments
  };
  struct Moment {
    std::string name;  // "exp_avg"
    ElementFormat format;
  };

  // An empty table for `numel` elements of `unit` on `device`. `stream` updates
  // offloaded states, or is null; it outlives this.
  ShardStates(std::string unit, int64_t numel, at::Device device,
              UpdateStream* stream)
      : unit_(std::move(unit)),
        numel_(numel),
        device_(device),
        stream_(stream) {}
  ShardStates(const ShardStates&) = delete;
  ShardStates& operator=(const ShardStates&) = delete;

  // ---- the table

  // Adds a state as zeros. REQUIRES: it does not exist. LOCAL.
  // ResourceExhausted.
  absl::Status Add(State state, ElementFormat format,
                   TieredBuffer::Place place);
  // As Add, where there is none of that dtype; one of another is dropped.
  absl::Status Ensure(State state, at::ScalarType dtype,
                      TieredBuffer::Place place);
  // Makes `part` the working shard: a part of a whole copy that this table does
  // not own, and that outlives it. Such a shard cannot move.
  void SetWorking(FlatBuffer part);
  // Adds moments as zeros; after an error there are none. REQUIRES: there are
  // none. LOCAL. ResourceExhausted.
  absl::Status AddMoments(const std::vector<Moment>& moments,
                          TieredBuffer::Place place);
  void Drop(State state) { At(state).Reset(); }
  void DropMoments() { moments_.clear(); }

  bool has(State state) const { return At(state).defined(); }
  // Returns a state. REQUIRES: a moment of that number exists.
  TieredBuffer& At(State state) {
    return state < kMoments ? table_[static_cast<size_t>(state)]
                            : moments_[static_cast<size_t>(state - kMoments)];
  }
  const TieredBuffer& At(State state) const {
    return const_cast<ShardStates*>(this)->At(state);
  }
  // Whether masters are remainders beside the working shard.
  bool splits() const;
  // Returns where what the optimizer updates lies: masters, their remainders,
  // or the working shard.
  TieredBuffer& value() { return At(has(kMasters) ? kMasters : kWorking); }
  const TieredBuffer& value() const {
    return const_cast<ShardStates*>(this)->value();
  }
  // Returns the dtype of what the optimizer updates: float32 if it is split.
  at::ScalarType value_dtype() const;
  // Returns the working shard where masters are separate, else null.
  TieredBuffer* separate_working() {
    return has(kMasters) ? &At(kWorking) : nullptr;
  }
  std::vector<TieredBuffer>& moments() { return moments_; }
  const std::vector<TieredBuffer>& moments() const { return moments_; }
  bool can_move(State state) const {
    return has(state) && !(state == kWorking && working_is_part_);
  }
  // Calls visit(state, buffer) for each existing state, until an error.
  template <typename Visit>
  absl::Status ForEach(const Visit& visit);
  // Returns all that a step writes: moments, the value and a separate working
  // shard.
  std::vector<TieredBuffer*> Written();

  // ---- values

  // Keeps the value in memory, for this thread's current stream, while the
  // result lives. Where it is split that is a copy of it, or without `join` the
  // remainders alone. LOCAL.
  absl::StatusOr<RaisedValue> RaiseValue(bool join = true);
  // Copy elements of a split value to `to` (float32) or from `from` (any
  // dtype), on any device. A piece at a time, so they need little memory beside
  // the tensors, except where SplitFrom gets a part of what lies elsewhere.
  // REQUIRES: splits(). LOCAL.
  absl::Status JoinTo(Range range, const at::Tensor& to);
  absl::Status SplitFrom(Range range, const at::Tensor& from);
  // Makes masters with the values of the working shard; `dtype` may be that of
  // remainders. REQUIRES: there are none. LOCAL.
  absl::Status MakeMasters(at::ScalarType dtype, TieredBuffer::Place place);
  // Sets the working shard to the rounded masters; does nothing where it is the
  // masters, or a half of them. LOCAL.
  absl::Status RoundMasters();
  // Takes `working`, [owned], which a program has written: the working shard
  // gets its values, and the masters get those elements that are no longer the
  // rounded master. Other masters keep the bits that the working shard cannot
  // hold. `before`: the working shard as it was, where `working` is that itself
  // and masters are split; else undefined. Waits for earlier updates. LOCAL.
  absl::Status TakeWorking(const at::Tensor& working,
                           const at::Tensor& before = {});

  // ---- what they are to hold next

  // Makes room for the next values of all offloaded states that a step writes;
  // after an error none has room. LOCAL. ResourceExhausted.
  absl::Status MakeRoomForNext();
  void DropNext();
  // Replaces the values by the next ones, wherever there is room for them.
  // REQUIRES: nobody reads them.
  void SwapNext();

  // ---- when

  // Makes this thread's current stream wait for changes of masters and the
  // working shard.
  void Order() const;
  // Notes that this thread's current stream has changed them.
  void SetChanged();
  // Sets the update at whose end they have new values; an invalid future has
  // ended.
  void SetUpdated(CommFuture updated);
  // Returns SetUpdated's future; invalid once it is known to have ended.
  CommFuture updated() const;
  // Waits for that update, and until the disk has what other units' updates
  // write; calls Order. Speculative updates continue. LOCAL.
  absl::Status AwaitUpdate();
  // As AwaitUpdate, and drops speculative updates. LOCAL.
  absl::Status AwaitAllUpdates();

 private:
  absl::Status TakeMasters(const at::Tensor& working);
  absl::Status TakeRemainders(const at::Tensor& working,
                              const at::Tensor& before);
  // Calls visit(piece, working, remainders) for the pieces of a range, with
  // tensors of their elements in memory; what lies elsewhere is copied there
  // and, if `writes`, back.
  template <typename Visit>
  absl::Status VisitHalves(Range range, bool writes, const Visit& visit);
  absl::Status AwaitLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string unit_;
  const int64_t numel_;
  const at::Device device_;
  UpdateStream* const stream_;
  std::array<TieredBuffer, kMoments> table_;
  std::vector<TieredBuffer> moments_;
  bool working_is_part_ = false;

  mutable absl::Mutex mutex_;
  StreamPoint changed_ ABSL_GUARDED_BY(mutex_);  // masters and working
  CommFuture updated_ ABSL_GUARDED_BY(mutex_);
};

// RaisedValue: keeps what the optimizer updates in memory from RaiseValue to
// the end of this, or to Commit.
class RaisedValue {
 public:
  // Returns the value, [owned], of ShardStates::value_dtype, or remainders.
  at::Tensor View() const {
    return joined_.defined() ? joined_.View() : raised_.View();
  }
  // Puts the changes back where the value lies; a split one also changes the
  // working shard. After an error they are lost.
  absl::Status Commit();

 private:
  friend class ShardStates;
  explicit RaisedValue(Raised raised) : raised_(std::move(raised)) {}

  Raised raised_;              // of nothing where the value is joined
  ShardStates* of_ = nullptr;  // where it is
  FlatBuffer joined_;
};

template <typename Visit>
absl::Status ShardStates::ForEach(const Visit& visit) {
  const int count = kMoments + static_cast<int>(moments_.size());
  absl::Status status;
  for (int i = 0; i < count && status.ok(); ++i) {
    const auto state = static_cast<State>(i);
    if (has(state)) status = visit(state, At(state));
  }
  return status;
}

}  // namespace tessera
#endif  // OFFLOAD_SHARD_STATES_H_
