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
// After an error of the disk what lies there is neither the old nor the new:
// every later Push and Drain returns that error. A checkpoint has what was
// saved. Of what is early and is not kept the old is whole: an error of it is
// only that it cannot be kept.
//
// An update may begin before it is known that it is the right one (PushEarly):
// what it writes goes to where the states' next values are to lie
// (TieredBuffer::next), and only Keep makes it what they hold; of what is not
// on the disk that is the business of what is pushed behind it.
//
//     PushEarly ... Keep        as if it had been pushed then
//     PushEarly ... Keep        nothing: it was taken back, or Drain was called
//     PushEarly ... Drain       by who changes what it reads: dropped
//
// Who needs new values before the disk has them takes them from the slices
// (StartFetch).
//
// And the first slices of what is likely to be pushed next can be read before
// it is, while there is nothing else to read (Foresee).
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
  int64_t most_states = 3;  // of a unit, on the disk; 0: there is none
  int64_t item_bytes = 4;   // of an element, at most
  // The part of Create's thread's that compute; one does at least.
  double threads = 1;
};

// Of memory, in all.
int64_t StreamBytes(const UpdateStreamOptions& options);

// What is to be done to one unit.
struct StreamedUpdate {
  struct State {
    TieredBuffer* buffer = nullptr;
    bool read = true;     // false: `compute` writes all of it
    bool written = true;  // false: `compute` only reads it
  };
  int64_t numel = 0;
  std::string unit;  // for traces
  // All on the stream's disk, of `numel`. They are the stream's, and stay where
  // they are, until Drain, and are not pushed again before.
  std::vector<State> states;
  // Elements [slice.begin, slice.end) of states[i] lie at data[i], and are
  // written from there. On the stream's thread, slice by slice; destroyed
  // before the future ends.
  std::function<absl::Status(Range slice, const std::vector<char*>& data)>
      compute;
  // After the last slice: where in a device's work what they have changed
  // there is to be had. Empty: they have changed nothing on a device.
  std::function<StreamPoint()> end;
};

// Since Create.
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
  // Waits for what has been pushed.
  ~UpdateStream();
  UpdateStream(const UpdateStream&) = delete;
  UpdateStream& operator=(const UpdateStream&) = delete;

  // When all slices have been computed, and when they are on the disk, too; who
  // waits goes on after StreamedUpdate::end, on its current stream.
  struct Pushed {
    CommFuture computed, written;
  };
  // LOCAL, ASYNC.
  Pushed Push(StreamedUpdate update);

  struct Unit;
  // New values on their way to memory; copied or read.
  class Fetch {
   public:
    // Until they are there, and nothing writes to that memory any more.
    absl::Status Wait() const;

   private:
    friend class UpdateStream;
    size_t state_ = 0;
    char* to_ = nullptr;
    CommPromise taken_;  // of slices
    SwapFuture read_;    // of others
  };
  // Copies what `state`, which is being changed, is to hold, all of it, to
  // `to`. Null where it is not being changed: what it holds is on the disk.
  // LOCAL, ASYNC.
  std::shared_ptr<const Fetch> StartFetch(const TieredBuffer& state, void* to);

  using Early = std::shared_ptr<Unit>;
  // What it reads stays as it is until Drain, or until it is kept or dropped
  // and whatever is pushed behind it begins. REQUIRES: DrainKept; its states
  // that are written have room for what comes next
  // (TieredBuffer::MakeRoomForNext). LOCAL, ASYNC.
  Early PushEarly(StreamedUpdate update);
  // Of these those that have not begun never will. LOCAL.
  void DropQueued();
  // It was the right one, as if pushed now: its states are flipped, and used by
  // nobody before these futures; `held` is let go when it is computed. Where it
  // has not begun it stays where it is in the queue. Nothing where it was taken
  // back (DropQueued, Drop), has been drained since, or has failed: it is
  // dropped. LOCAL.
  std::optional<Pushed> Keep(const Early& early, std::shared_ptr<void> held);
  // It was not. LOCAL.
  void Drop(const Early& early);
  // Units of up to so many states may be pushed from here on. REQUIRES: Drain.
  // ResourceExhausted; it is as before then. LOCAL.
  absl::Status Reserve(int64_t states);
  // What is pushed from here on is expected to read these, each perhaps among
  // others behind them, in this order: as much as the stream's memory holds is
  // read once what is not early has been written, and nothing else is to be
  // read; in vain if another comes. They stay where and as they are until
  // Drain, or until they are pushed. In place of what was foreseen before and
  // is not being read. LOCAL, ASYNC.
  void Foresee(const std::vector<std::vector<TieredBuffer*>>& units);
  // All that was pushed has been computed and written, early ones are dropped,
  // and nothing is foreseen; the error of before, if there was one. LOCAL,
  // blocking.
  absl::Status Drain();
  // The same, but for early ones, which go on. LOCAL, blocking.
  absl::Status DrainKept();

  // Something that lies on the disk is neither the old nor the new, by another
  // writer than this one: as after an error of its own. LOCAL.
  void Fail(const absl::Status& status);
  // Who writes to what lies on the disk otherwise calls this before: it calls
  // what was set, by which those that read it meanwhile come to an end. LOCAL.
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
    // Whose new values these are, and which: by mutex_.
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
  bool MayForesee() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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

  // The thread's own, but for Reserve; what StartFetch reads of them is changed
  // by mutex_. Slices are numbered as they come: those
  // below computed_ have been, those below read_ are being read or have been;
  // from pushed_ on they are of units that are foreseen.
  std::vector<Buffer> buffers_;
  int64_t read_ = 0, pushed_ = 0, computed_ = 0;
  std::shared_ptr<Unit> reading_;  // null: the next
  int64_t reading_at_ = 0;         // its elements below are being read
  Units ahead_;  // those that are foreseen and read; the last may be reading_

  mutable absl::Mutex mutex_;
  std::deque<std::shared_ptr<Unit>> queue_ ABSL_GUARDED_BY(mutex_);
  // Units that are not at their end: early ones, and the others.
  int64_t early_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t kept_ ABSL_GUARDED_BY(mutex_) = 0;
  // By what those that are not early change, until it is written.
  absl::flat_hash_map<const TieredBuffer*, std::shared_ptr<Unit>> changing_
      ABSL_GUARDED_BY(mutex_);
  int64_t drains_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pushes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of what is pushed from foreseen_from_ on: what is expected and not read
  // yet.
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
