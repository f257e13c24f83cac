// PeerProgress: tracks where the other ranks are, from what they write about
// once a second (comm/watch/announcements.h).
//
// Threads: one at a time.
#ifndef COMM_WATCH_PEER_PROGRESS_H_
#define COMM_WATCH_PEER_PROGRESS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "comm/watch/announcements.h"

namespace tessera {

class PeerProgress {
 public:
  // `announcements` is borrowed and outlives this.
  explicit PeerProgress(const Announcements* announcements)
      : announcements_(announcements), known_(announcements->world_size()) {}

  void Learn(const AnnouncementSnapshot& snapshot);

  // Describes a wait that has lasted for `waited`, in a collective of `ranks`:
  // which of them have not come, or are elsewhere, and which wait. `awaited`:
  // the rank whose message this rank waits for, or -1.
  std::string Describe(const WaitingIn& wait, const std::vector<int>& ranks,
                       int awaited, absl::Duration waited) const;
  // Where `rank` is, as far as is known: "it is in unit a #41 (all-reduce
  // ...)".
  std::string Of(int rank) const;

 private:
  struct Known {
    std::optional<WaitingIn> last;
    absl::Duration since;  // the time when its beat was seen to change
  };

  // "last heard of 5s ago", "" if its beat goes on.
  std::string Silence(int rank) const;
  bool HasEnded(int rank) const;
  // Why another rank has not come, "" if it has.
  std::string WhyAbsent(int rank, const WaitingIn& wait) const;
  // Where another rank is that does not wait in it, "" if it does.
  std::string WhyElsewhere(int rank, const WaitingIn& wait) const;
  std::vector<std::string> WithoutStore(const WaitingIn& wait,
                                        const std::vector<int>& ranks,
                                        int awaited) const;

  const Announcements* const announcements_;
  std::vector<Known> known_;  // by rank
};

}  // namespace tessera
#endif  // COMM_WATCH_PEER_PROGRESS_H_
