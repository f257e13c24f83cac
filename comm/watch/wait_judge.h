// WaitJudge: decides when this rank gives up waiting for others, and with which
// message. One set of rules for collectives (comm/watch/wait_monitor.h) and for
// shards of other ranks (comm/serve/shard_watch.h).
//
//   begin   100 ms     0.3 s        0.7 s        grace           timeout
//   |-------|----------|------------|------------|---------------|
//           first look              looks are 0.4 s apart from here on
//
// A wait is ended
//   at a look      by a final announcement (a peer's group has failed)
//   at a look      where ranks are in different collectives of one number
//   after 0.3 s    when the process of a rank is gone
//                  (comm/watch/liveness_monitor.h); what had come from it
//                  before may still end the wait as it should
//   after the grace  by an announcement that has been standing for so long
//                  during that wait, if the peer is not in the same collective
//                  itself: a peer that announces usually comes to the next
//                  agreement of all ranks, where all learn its error in an
//                  orderly way, however late the last rank is. Of a rank that
//                  is not in the group whose wait this is: if it is in no
//                  collective
//   after the timeout  naming whom this rank waits for, which the caller knows
//
// All times are those of the clock of the Announcements.
//
// Threads: one at a time. Looks ask the store, so they may block for a second.
#ifndef COMM_WATCH_WAIT_JUDGE_H_
#define COMM_WATCH_WAIT_JUDGE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/watch/announcements.h"
#include "comm/watch/peer_progress.h"

namespace tessera {

class WaitJudge {
 public:
  struct Options {
    absl::Duration timeout;  // of one wait
    absl::Duration grace;    // for an announcement, see above
  };

  struct Wait {
    std::string name;  // "unit a #7 (all-gather, 64 bytes of float32)"
    absl::Duration begin;
    // The ranks of the group that waits, ascending, as the first group numbers
    // them. Borrowed.
    const std::vector<int>* ranks = nullptr;
    // Null: it is in no collective. Borrowed.
    const WaitingIn* collective = nullptr;
  };

  // `announcements` is borrowed and outlives this.
  WaitJudge(Announcements* announcements, Options options);

  // How often to judge. A wait is long, and looked at, from this age on.
  absl::Duration tick() const { return tick_; }

  // Judges by the processes of ranks; OK: keep waiting. LOCAL.
  absl::Status JudgeEnded(const Wait& wait) const;
  // Judges by what ranks have announced, and where they are. Between looks
  // always OK. LOCAL.
  absl::Status JudgeAnnouncements(const Wait& wait);
  bool TimedOut(absl::Duration begin) const;
  // DeadlineExceeded: `name` has not ended in time because of `whom`.
  absl::Status TooLong(absl::string_view name, absl::string_view whom) const;

  // A rank ended at `since`: must a wait that began at `begin` end for that?
  bool EndedGraceIsOver(absl::Duration since, absl::Duration begin) const;
  // The first announcement that stands; without one, `otherwise`: what a rank
  // has announced tells more than what is seen of it from here.
  absl::Status PostedOr(const absl::Status& otherwise) const;

  // Where the others are. Also to be told what the caller reads itself.
  PeerProgress& progress() { return progress_; }
  const PeerProgress& progress() const { return progress_; }

 private:
  bool IsDue(const Wait& wait);
  absl::Status JudgePosted(const Wait& wait,
                           const AnnouncementSnapshot& snapshot);
  absl::Status JudgeMismatch(const WaitingIn& collective,
                             const AnnouncementSnapshot& snapshot) const;

  Announcements* const announcements_;
  const Options options_;
  const absl::Duration tick_;
  // These are of the wait that began at `judged_begin_`.
  absl::Duration judged_begin_ = -absl::InfiniteDuration();
  absl::Duration interval_, look_at_;
  absl::Duration looked_at_ = -absl::InfiniteDuration();
  // By rank and count: when an announcement that stands was first seen.
  std::map<std::pair<int, int64_t>, absl::Duration> first_seen_;
  PeerProgress progress_;
};

// Unavailable: that `rank` takes no part any more.
absl::Status HasEnded(int rank, bool left);

}  // namespace tessera
#endif  // COMM_WATCH_WAIT_JUDGE_H_
