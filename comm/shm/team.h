// Team: the ranks of one host as they see each other in shared memory, and how
// one waits for another.
//
//   head of rank r   [ Control | staging .. ]   mapped writable by all, for the
//                                               doorbells
//   heap of rank r   [ tensors ........ ]       mapped read-only by the others
//
// A counter has one writer, its rank, and only grows. Who waits for a counter
// spins for a moment and then sleeps on its own doorbell, which whoever
// publishes rings: a waiting rank burns no core.
//
// Threads: one thread issues collectives (Publish, WaitFor); Abort may come
// from any.
#ifndef COMM_SHM_TEAM_H_
#define COMM_SHM_TEAM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/shared_mutex.h"
#include "comm/collective.h"
#include "comm/reduce/reduce.h"

namespace tessera::shm {

inline constexpr int kMaxRanks = 64;

// What a rank says about a collective when it enters it. `rows` are what it
// lets the others read: row d, bytes [row_begin[d], row_begin[d + 1]).
struct Post {
  CollectiveOp op = CollectiveOp::kBarrier;
  ElementType type = ElementType::kUInt8;
  int32_t root = 0;
  int64_t numel = 0;    // the caller's: must be identical on all ranks
  char what[168] = {};  // what it is for, cut off; must be identical
  uint64_t what_hash = 0;

  int64_t direct_offset = -1;  // of row 0 in the rank's heap; -1: staged
  int32_t num_rows = 0;
  int64_t row_begin[kMaxRanks + 1] = {};
};

// Where one thread sleeps until it is rung for.
//
//   sleeper   sleeping = 1; seen = bell; looks whether there is anything to do;
//             Sleep(seen)
//   others    do what it waits for, then RingIfSleeping
struct alignas(64) Door {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleeping;

  void Ring();
  void RingIfSleeping() {
    // Sequentially consistent, with the sleeper's accesses: either it sees what
    // was done, or this sees it.
    if (sleeping.load(std::memory_order_seq_cst) != 0) Ring();
  }
  // Until a ring after `seen` was read, or for so long; may return early.
  void Sleep(uint32_t seen, absl::Duration at_most);
};

struct Control {
  struct alignas(64) Counter {
    std::atomic<uint64_t> value;
  };
  Counter posted;  // collectives entered
  Counter ready;   // windows that the others may read
  Counter taken;   // windows that this rank has read of all others
  Counter broken;  // the first collective that this rank has given up
  Counter left;    // 1: this rank will enter no more collectives
  Door door;       // of who waits in a collective
  // The post of collective n is posts[n % 2]: nobody enters n + 2 before all
  // have read n.
  alignas(64) Post posts[2];
};

// How one rank's memory looks from this process.
struct Member {
  char* head = nullptr;
  const char* heap = nullptr;
};

class Team {
 public:
  // `members` by rank; their memory outlives this. `heap_bytes`: how much of
  // each rank's heap the others can read.
  Team(int rank, std::vector<Member> members, int64_t heap_bytes);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  Control& mine() const { return of(rank_); }
  Control& of(int rank) const {
    return *reinterpret_cast<Control*>(members_[rank].head);
  }
  char* head_of(int rank) const { return members_[rank].head; }
  const char* heap_of(int rank) const { return members_[rank].heap; }
  // Returns the offset of [place, place + bytes) in this rank's heap; -1 if the
  // others cannot read all of it there.
  int64_t OffsetInHeap(const void* place, int64_t bytes) const;

  // Raises a counter of mine() and wakes sleeping ranks. LOCAL.
  void Publish(Control::Counter* counter, uint64_t value);

  // Blocks until the counter of rank `peer` is at least `value`. Returns what
  // Abort was given, or what is said of `peer` if it is gone and will never
  // raise it.
  absl::Status WaitFor(int peer, Control::Counter Control::*counter,
                       uint64_t value);

  // Called by WaitFor with the rank that it is about to sleep for. Set before
  // the first collective.
  void SetOnSleep(std::function<void(int peer)> on_sleep);
  // Sets a function that says whether a rank is gone, and how; it is called now
  // and then for the rank that is slept for. Set it before the first
  // collective.
  void SetGone(std::function<absl::Status(int peer)> gone);

  // Marks that this rank enters no more collectives. LOCAL.
  void Leave() { mine().left.value.store(1); }
  bool HasLeft(int peer) const { return of(peer).left.value.load() != 0; }

  // Calls `note` with each other rank that this one has slept for since the
  // last call, and for how long. LOCAL.
  void TakeWaits(const std::function<void(int peer, absl::Duration)>& note);

  // Makes each WaitFor that sleeps, now or later, return `why`. LOCAL.
  void Abort(const absl::Status& why);
  // Returns the first Abort's `why`; OK before.
  absl::Status aborted();

 private:
  const int rank_;
  const std::vector<Member> members_;
  const int64_t heap_bytes_;
  const int spins_;
  std::function<void(int)> on_sleep_ = [](int) {};
  std::function<absl::Status(int)> gone_;
  std::vector<absl::Duration> waits_;  // by rank

  std::atomic<bool> trouble_{false};  // there is something below
  // Not absl's, of which ThreadSanitizer sees nothing where the system built
  // it.
  SharedMutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera::shm
#endif  // COMM_SHM_TEAM_H_
