// WaitMonitor: ends waits that would not end by themselves.
//
//   communication thread   Begin -> ... blocked in the transport ... -> End
//   "tessera-watch"        looks now and then: too long? has a peer announced?
//                          then it notes a verdict and calls `abort`
//
// An announcement ends a wait when it has been standing for the grace during
// that wait and the peer is not in the same collective itself: a peer that
// announces usually comes to the next agreement of all ranks, where its error
// is told to all in an orderly way, however late the last rank is. A final
// announcement (the peer's communicator has failed) ends a wait at once.
//
// Ranks that wait for different collectives under one number are told so once
// both have waited for the grace.
//
// Threads: Begin and End come from one thread.
#ifndef COMM_WAIT_MONITOR_H_
#define COMM_WAIT_MONITOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/announcements.h"

namespace tessera {

class WaitMonitor {
 public:
  struct Options {
    absl::Duration timeout;  // of one collective
    absl::Duration grace;    // for an announcement, see above
  };

  // `board` is borrowed and outlives this. `abort` makes the blocked wait
  // return soon; it is called on the watching thread, at most once per wait.
  WaitMonitor(Announcements* board, Options options,
              std::function<void()> abort);
  ~WaitMonitor();

  void Begin(WaitingIn wait);
  // Ends the wait. OK if `outcome` is. Otherwise the reason, best known first:
  // the verdict, what a peer announced, `outcome` itself; and that reason is
  // announced to the others as final. May ask the store.
  absl::Status End(const absl::Status& outcome);

 private:
  void Watch();
  // What to say about wait number `id` after `waited`; OK: let it go on.
  absl::Status Judge(const WaitingIn& wait, int64_t id, absl::Duration waited);
  absl::Status JudgeAnnouncements(const WaitingIn& wait);
  absl::Status JudgeMismatch(const WaitingIn& wait);
  bool IsInSame(const WaitingIn& wait, int rank);
  absl::Status TooLong(const WaitingIn& wait);

  Announcements* const board_;
  const Options options_;
  const absl::Duration tick_;
  const std::function<void()> abort_;

  // Of the watching thread alone. Times are of the monotonic clock.
  int64_t published_ = 0;  // the wait whose name the others can read
  int64_t seen_in_ = 0;    // the wait that `seen_` is of
  std::map<std::pair<int, int64_t>, absl::Duration> seen_;  // rank, count

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool active_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t id_ ABSL_GUARDED_BY(mutex_) = 0;  // counts waits
  WaitingIn wait_ ABSL_GUARDED_BY(mutex_);
  absl::Duration begin_ ABSL_GUARDED_BY(mutex_);
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tessera
#endif  // COMM_WAIT_MONITOR_H_
