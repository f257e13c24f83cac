// WaitMonitor: ends waits in collectives that would not end by themselves.
//
//   communication thread   Begin -> ... blocked in the transport ... -> End
//   "tessera-watch"        looks now and then, and asks the judge
//                          (comm/watch/wait_judge.h: the rules, and the times);
//                          its verdict is noted, and `abort` is called
//
// A timeout names the ranks that have not come and what they did last; this
// rank, and those that did not come if they can, then leave a file behind
// (comm/record/hang_dump.h).
//
// A wait that has not ended kAbortGrace after `abort` was called never will:
// the process logs the verdict and ends, with exit code 1.
//
// Each rank writes about once a second what it is in, or was in last, to the
// store (and soon after it begins to wait long), and reads what the others have
// written; so it can tell what a rank did last that does not come.
//
// One monitor serves all groups of a domain (comm/watch/failure_domain.h;
// another one the thread that watches devices): each wait is in a collective of
// one of them. The ranks here are those of the first group.
//
// Threads: Begin and End come from one thread.
#ifndef COMM_WATCH_WAIT_MONITOR_H_
#define COMM_WATCH_WAIT_MONITOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/watch/announcements.h"
#include "comm/watch/wait_judge.h"

namespace tessera {

inline constexpr absl::Duration kAbortGrace = absl::Seconds(30);

// A group whose collectives are waited in.
struct WatchedGroup {
  std::string name;        // "" is the domain's first
  std::vector<int> ranks;  // of the domain's first group, ascending
  // Makes the blocked wait return soon; owns what it uses. Called on the
  // watching thread, at most once per wait.
  std::function<void()> abort;
};

class WaitMonitor {
 public:
  struct Options {
    absl::Duration timeout;  // of one collective
    absl::Duration grace;    // for an announcement, see WaitJudge
    absl::Duration abort_grace = kAbortGrace;
    // False: nobody looks but the caller (tests whose clock is moved by hand).
    bool on_watchdog = true;
    // False: what is waited in is not told to the other ranks: they know, since
    // they have agreed on it before.
    bool publishes = true;
  };

  // `announcements` is borrowed and outlives this.
  WaitMonitor(Announcements* announcements, Options options);
  ~WaitMonitor();

  // ResourceExhausted if nobody looks, for want of a thread: then no wait may
  // begin.
  absl::Status watching() const { return watch_.status(); }

  // `wait` tells what is waited in, and `group` where.
  void Begin(WaitingIn wait, std::shared_ptr<const WatchedGroup> group);
  // For transports that know: it is this rank whose message is waited for now.
  // Told to the user where the store cannot tell who has not come, or all have.
  void SetAwaited(int rank) { awaited_ = rank; }
  // Ends the wait. OK if `outcome` is. Otherwise the reason, best known first:
  // the verdict, what a peer announced, that a rank has ended, `outcome`
  // itself; and that reason is announced to the others as final. May ask the
  // store.
  absl::Status End(const absl::Status& outcome);
  // There are no more collectives of this group. Any thread.
  void Forget(const std::string& group);

  // One look, as the watching thread takes them. REQUIRES: on_watchdog is
  // false, or this is that thread.
  void Look();

 private:
  struct Current {
    WaitingIn wait;                             // or the last one
    std::shared_ptr<const WatchedGroup> group;  // while active
    int64_t id = 0;
    bool active = false;
    bool judged = false;
    absl::Duration begin, judged_at;
  };

  // All below run on the watching thread.
  void Publish(const Current& current);
  // Why the wait is to end; OK: let it go on.
  absl::Status Judge(const Current& current);
  // For a rank that the others have given up waiting for.
  void DumpIfGivenUp(const AnnouncementSnapshot& snapshot);
  void EndIfStuck(const Current& current);

  Announcements* const announcements_;
  const Options options_;

  // Used by the watching thread only.
  WaitJudge judge_;
  absl::Duration publish_at_;
  int64_t published_ = 0;  // the wait whose name the others can read
  bool dumped_ = false;

  std::atomic<int> awaited_{-1};
  absl::Mutex mutex_;
  Current current_ ABSL_GUARDED_BY(mutex_);
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
  absl::StatusOr<int64_t> watch_ = 0;  // of Watchdog::Add
};

}  // namespace tessera
#endif  // COMM_WATCH_WAIT_MONITOR_H_
