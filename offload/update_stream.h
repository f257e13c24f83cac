// UpdateStream: changes states that lie on a disk, or on the host while their
// units are on a device, unit by unit, on a thread of its own. What lies on a
// disk goes through a few small buffers of memory:
//
//     slice i+2   being read
//     slice i+1   read
//     slice i     computed, on the thread
//     slice i-1   being written
//
// A slice is the same elements of all states of a unit (masters, exp_avg,
// exp_avg_sq), and slices go on from one unit to the next without a stop. So an
// update costs what its transfers cost, or its arithmetic, whichever is more,
// and memory that does not grow with the model. It runs while the program goes
// on: what needs the values of a unit waits for the future of Push.
//
// After an error of the disk, states there may be half written: every later
// Push and Drain returns that error, and training resumes from a checkpoint. An
// early update that is not kept leaves the old values whole: after an error it
// can just not be kept.
//
// An update may be speculative (PushEarly): it writes to the states' next
// values (TieredBuffer::next), and only Keep makes these the values. For states
// that are not on the disk, the update that is pushed after it has to do that.
//
//     PushEarly ... Keep        as if it had been pushed then
//     PushEarly ... Keep        nothing: it was taken back, or Drain was called
//     PushEarly ... Drain       by who changes what it reads: dropped
//
// New values can be taken from the slices before the disk has them
// (StartFetch).
//
// The first slices of what is likely to be pushed next can be read ahead, while
// there is nothing else to read (Prefetch).
//
// Source: ZeRO-Infinity (arXiv 2104.07857), section 5.2.
// Threads: any.
#ifndef OFFLOAD_UPDATE_STREAM_H_
#define OFFLOAD_UPDATE_STREAM_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/layout/layout.h"
#include "base/memory/memory.h"
#include "base/stream/stream_point.h"
#include "comm/comm_promise.h"
#include "comm/communicator.h"
#include "offload/disk/swap_file.h"
#include "offload/tiered_buffer.h"

namespace tessera {

struct UpdateStreamOptions {
  int buffers = 12;  // slices in memory at a time
  // Elements of a slice, a multiple of 4096: so slices begin where a kernel's
  // groups of elements do, and where a disk's blocks do. Of states in blocks
  // (offload/element_format.h) it takes more: BytesOf(slice_numel) must be a
  // multiple of kSwapAlignment.
  int64_t slice_numel = 1 << 20;
  int64_t most_states = 3;  // of a unit, on the disk; 0: there is no disk
  int64_t item_bytes = 4;   // the most of an element
  // The part of Create's thread's that compute; one does at least.
  double threads = 1;
};

// Returns the bytes of memory that the stream takes.
int64_t StreamBytes(const UpdateStreamOptions& options);

// The update of one unit.
struct StreamedUpdate {
  struct State {
    TieredBuffer* buffer = nullptr;
    bool read = true;     // false: `compute` writes all of it
    bool written = true;  // false: `compute` only reads it
  };
  int64_t numel = 0;
  std::string unit;  // for traces
  // The states, all on the stream's disk and of `numel` elements. They belong
  // to the stream, do not move and are not pushed again until Drain.
  std::vector<State> states;
  // Computes a slice: elements [slice.begin, slice.end) of states[i] lie at
  // data[i], and are written from there. Called on the stream's thread, slice
  // by slice; destroyed before the future ends.
  std::function<absl::Status(Range slice, const std::vector<char*>& data)>
      compute;
  // Called after the last slice: returns the point of a device's work at which
  // its changes there are done. Empty: nothing on a device was changed.
  std::function<StreamPoint()> end;
};

// Statistics since Create.
struct UpdateStreamStats {
  absl::Duration computing;  // in StreamedUpdate::compute
  absl::Duration stalled;    // waited for the disk, with something to do
};

class UpdateStream {
 public:
  // Takes its memory (`buffers` slices of `most_states`), and starts its
  // thread. `disk`: null where there are no states on one. ResourceExhausted.
  // LOCAL.
  static absl::StatusOr<std::unique_ptr<UpdateStream>> Create(
      std::shared_ptr<SwapFile> disk, const UpdateStreamOptions& options);
  // Waits until all that was pushed is done.
  ~UpdateStream();
  UpdateStream(const UpdateStream&) = delete;
  UpdateStream& operator=(const UpdateStream&) = delete;

  // Done when all slices have been computed, and when they are also on the
  // disk. A waiter's current stream continues after StreamedUpdate::end.
  struct Pushed {
    CommFuture computed, written;
  };
  // Queues an update. LOCAL, ASYNC.
  Pushed Push(StreamedUpdate update);

  struct Unit;
  // New values that are being copied or read to memory.
  class Fetch {
   public:
    // Waits until they are there, and nothing writes to that memory any more.
    absl::Status Wait() const;

   private:
    friend class UpdateStream;
    size_t state_ = 0;
    char* to_ = nullptr;
    CommPromise taken_;  // of slices
    SwapFuture read_;    // of others
  };
  // Copies the new values of `state`, which is being updated, to `to`. Null
  // where it is not being updated: its values are on the disk. LOCAL, ASYNC.
  std::shared_ptr<const Fetch> StartFetch(const TieredBuffer& state, void* to);

  using Early = std::shared_ptr<Unit>;
  // Queues a speculative update. The states that it reads must not change until
  // Drain, or until it is kept or dropped and the next pushed update begins.
  // REQUIRES: DrainKept; its written states have room for next values
  // (TieredBuffer::MakeRoomForNext). LOCAL, ASYNC.
  Early PushEarly(StreamedUpdate update);
  // Drops the speculative updates that have not begun. LOCAL.
  void DropQueued();
  // Commits a speculative update, as if it were pushed now: its new values
  // replace the old ones. Nobody may use its states until the returned futures
  // are done; `held` is released when it is computed. An update that has not
  // begun keeps its place in the queue. Returns nullopt, and drops it, if it
  // was dropped already (DropQueued, Drop), has been drained since, or has
  // failed. LOCAL.
  std::optional<Pushed> Keep(const Early& early, std::shared_ptr<void> held);
  // Discards a speculative update; its states stay as they were. LOCAL.
  void Drop(const Early& early);
  // Allows units of up to so many states from here on. REQUIRES: Drain.
  // ResourceExhausted, after which nothing has changed. LOCAL.
  absl::Status Reserve(int64_t states);
  // Predicts what the next pushed updates read first, in this order; an update
  // may read further states after these. As much as the stream's memory holds
  // is read ahead, once all updates that are not early have been written and
  // nothing else is to be read; if another unit is pushed instead, it is thrown
  // away. The states must not move or change until Drain, or until they are
  // pushed. It replaces earlier predictions that are not being read. LOCAL,
  // ASYNC.
  void Prefetch(const std::vector<std::vector<TieredBuffer*>>& units);
  // Waits until all that was pushed has been computed and written, drops early
  // updates and predictions, and returns the stream's error, if there was one.
  // LOCAL, blocking.
  absl::Status Drain();
  // As Drain, but early updates continue. LOCAL, blocking.
  absl::Status DrainKept();

  // Makes every later call return `status`, as after an error of its own:
  // another writer left a state half written. LOCAL.
  void Fail(const absl::Status& status);
  // Must be called before anything else writes to states on the disk: it calls
  // the function that was set, which ends concurrent readers. LOCAL.
  void BeforeWrite() const {
    if (before_write_) before_write_();
  }
  void SetBeforeWrite(std::function<void()> before) {
    before_write_ = std::move(before);
  }

  const std::shared_ptr<SwapFile>& disk() const { return disk_; }  // or null
  int64_t resident_bytes() const { return memory_bytes_; }
  UpdateStreamStats stats() const;

 private:
  // A slice in memory.
  struct Buffer {
    CountedBuffer memory;
    std::shared_ptr<Unit> unit;  // from its read to the end of its write
    // The unit and range of the new values in this buffer; guarded by mutex_.
    std::shared_ptr<Unit> computed;
    Range slice;
    std::vector<char*> data;  // by state
    std::vector<SwapFuture> reads, writes;
  };

  UpdateStream(std::shared_ptr<SwapFile> disk,
               const UpdateStreamOptions& options)
      : disk_(std::move(disk)), options_(options) {}
  absl::StatusOr<std::vector<Buffer>> TakeMemory(int64_t states) const;
  void Use(std::vector<Buffer> buffers);
  void Run();
  bool Next();
  void ReadAhead();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayPrefetch() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom() const {
    return read_ - computed_ < static_cast<int64_t>(buffers_.size());
  }
  int64_t FirstInMemory() const {
    return std::max<int64_t>(0, read_ - static_cast<int64_t>(buffers_.size()));
  }
  std::shared_ptr<Unit> Pop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Begin(std::shared_ptr<Unit> unit, const absl::Status& failed);
  void Adopt(const std::shared_ptr<Unit>& unit);
  void DropAhead();
  void EndAhead();
  void FailUnit(Unit* unit, const absl::Status& status);
  void StartRead(const Unit& unit, size_t first_state, Buffer* buffer);
  absl::Status Compute(Buffer* buffer);
  void StartWrite(Buffer* buffer);
  void AwaitWritten(Buffer* buffer);
  void RetireWritten();
  void EndSlice(Buffer* buffer, const absl::Status& status);
  void EndComputed(Unit* unit);
  void EndWritten(Unit* unit);
  std::shared_ptr<Unit> UnitOf(StreamedUpdate update, bool early) const;
  void Queue(std::shared_ptr<Unit> unit);
  void Announce(const std::shared_ptr<Unit>& unit)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Renounce(const Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetComputed(Buffer* buffer);
  static void TakeSlice(const Buffer& buffer, Fetch* fetch);
  void EndFetches(Unit* unit);
  using Units = std::vector<std::shared_ptr<Unit>>;
  Units TakeQueuedEarly() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t& CountOf(const Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeOver(const Early& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Buffer& At(int64_t slice_number) {
    return buffers_[static_cast<size_t>(slice_number %
                                        static_cast<int64_t>(buffers_.size()))];
  }

  const std::shared_ptr<SwapFile> disk_;
  UpdateStreamOptions options_;
  std::function<void()> before_write_;
  int64_t memory_bytes_ = 0;

  // Used by the thread only, except in Reserve; what StartFetch reads of them
  // is changed under mutex_. Slices are numbered as they come: those below
  // computed_ have been computed, those below read_ are being read or have
  // been; those from pushed_ on belong to units that are predicted.
  std::vector<Buffer> buffers_;
  int64_t read_ = 0, pushed_ = 0, computed_ = 0;
  std::shared_ptr<Unit> reading_;  // null: the next
  int64_t reading_at_ = 0;         // its elements below are being read
  Units ahead_;  // those that are foreseen and read; the last may be reading_

  mutable absl::Mutex mutex_;
  std::deque<std::shared_ptr<Unit>> queue_ ABSL_GUARDED_BY(mutex_);
  // Numbers of unfinished units: early ones, and others.
  int64_t early_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t kept_ ABSL_GUARDED_BY(mutex_) = 0;
  // For each buffer that a committed unit is writing: that unit.
  absl::flat_hash_map<const TieredBuffer*, std::shared_ptr<Unit>> changing_
      ABSL_GUARDED_BY(mutex_);
  int64_t drains_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pushes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Predicted units that are not read yet, for pushes from number
  // foreseen_from_ on.
  std::deque<std::shared_ptr<Unit>> foreseen_ ABSL_GUARDED_BY(mutex_);
  int64_t foreseen_from_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_ahead_ ABSL_GUARDED_BY(mutex_) = false;  // of ahead_ there are some
  bool forget_ ABSL_GUARDED_BY(mutex_) = false;    // them
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;     // the thread, for work
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  UpdateStreamStats stats_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tessera
#endif  // OFFLOAD_UPDATE_STREAM_H_
