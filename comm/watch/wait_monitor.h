// WaitMonitor: ends waits that would not end by themselves.
//
//   communication thread   Begin -> ... blocked in the transport ... -> End
//   "tessera-watch"        looks now and then: too long? has a peer announced,
//                          or ended? Then it notes a verdict and calls `abort`
//
// A wait is ended
//   at once        by a final announcement (a peer's communicator has failed)
//   after 0.1-0.7 s  where ranks are in different collectives of one number
//   after 0.3 s    when the process of a rank is gone
//   (comm/watch/liveness_monitor.h); what
//                  had come from it before may still complete the collective
//   after the grace  by an announcement that has been standing for so long
//                  during that wait, if the peer is not in the same collective
//                  itself: a peer that announces usually comes to the next
//                  agreement of all ranks, where its error is told to all in an
//                  orderly way, however late the last rank is. Of a rank that
//                  is not in the group whose collective this is: if it is in no
//                  collective
//   after the timeout  naming the ranks that have not come and what they did
//                  last; this rank, and those that did not come if they can,
//                  then leave a file behind (comm/record/hang_dump.h)
//
// A wait that has not ended kAbortGrace after `abort` was called never will:
// the process logs the verdict and ends, with exit code 1.
//
// Each rank writes about once a second what it is in, or was in last, to the
// store (and soon after it begins to wait long), and reads what the others have
// written; so it can tell what a rank did last that does not come.
//
// One monitor serves all groups of a domain (comm/watch/failure_domain.h): each
// wait is in a collective of one of them. The ranks here are those of the first
// group.
//
// Threads: Begin and End come from one thread.
#ifndef COMM_WATCH_WAIT_MONITOR_H_
#define COMM_WATCH_WAIT_MONITOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/watch/announcements.h"
#include "comm/watch/peer_progress.h"

namespace tessera {

inline constexpr absl::Duration kAbortGrace = absl::Seconds(30);

// A group whose collectives are waited in.
struct WatchedGroup {
  std::string name;        // "" is the domain's first
  std::vector<int> ranks;  // of the board, ascending
  // Makes the blocked wait return soon; owns what it uses. Called on the
  // watching thread, at most once per wait.
  std::function<void()> abort;
};

class WaitMonitor {
 public:
  struct Options {
    absl::Duration timeout;  // of one collective
    absl::Duration grace;    // for an announcement, see above
    absl::Duration abort_grace = kAbortGrace;
  };

  // `board` is borrowed and outlives this.
  WaitMonitor(Announcements* board, Options options);
  ~WaitMonitor();

  // `wait` tells what is waited in, and `group` where.
  void Begin(WaitingIn wait, std::shared_ptr<const WatchedGroup> group);
  // For transports that know: it is this rank whose message is waited for now.
  // Said where the store cannot tell who has not come, or all have.
  void SetAwaited(int rank) { awaited_ = rank; }
  // Ends the wait. OK if `outcome` is. Otherwise the reason, best known first:
  // the verdict, what a peer announced, that a rank has ended, `outcome`
  // itself; and that reason is announced to the others as final. May ask the
  // store.
  absl::Status End(const absl::Status& outcome);
  // There are no more collectives of this group. Any thread.
  void Forget(const std::string& group);

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
  void Look();
  void Publish(const Current& current);
  bool IsDue(const Current& current);
  // What to say about the wait; OK: let it go on.
  absl::Status Judge(const Current& current);
  absl::Status JudgeEnded(const Current& current) const;
  absl::Status JudgeAnnouncements(const Current& current,
                                  const AnnouncementSnapshot& board);
  absl::Status JudgeMismatch(const WaitingIn& wait,
                             const AnnouncementSnapshot& board) const;
  absl::Status TooLong(const Current& current) const;
  // For a rank that the others have given up waiting for.
  void DumpIfGivenUp(const AnnouncementSnapshot& board);
  void EndIfStuck(const Current& current);

  Announcements* const board_;
  const Options options_;
  const absl::Duration tick_;

  // Of the watching thread alone. Times are of the monotonic clock.
  absl::Duration publish_at_, look_at_, interval_;
  int64_t published_ = 0;  // the wait whose name the others can read
  int64_t seen_in_ = 0;    // the wait that `seen_` and `look_at_` are of
  bool dumped_ = false;
  std::map<std::pair<int, int64_t>, absl::Duration> seen_;  // rank, count
  PeerProgress progress_;

  std::atomic<int> awaited_{-1};
  absl::Mutex mutex_;
  Current current_ ABSL_GUARDED_BY(mutex_);
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
  int64_t watch_ = 0;  // of Watchdog::Add
};

}  // namespace tessera
#endif  // COMM_WATCH_WAIT_MONITOR_H_
