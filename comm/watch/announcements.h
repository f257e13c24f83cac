// Announcements: exchanges texts between ranks outside of collectives, through
// the store where they met.
//
//   posted/<rank>   "<count> <kind> <status>", kind: now, final, past; the
//                   status as of StatusToText, "" if past
//   waiting/<rank>  "<beat> <sequence> <signature> <in|out> <what>", <details>,
//                   <group>, and for each group "<sequence> <group>", with \x1f
//                   between them: the last collective that it is known to have
//                   begun, and the last of each group; <beat> grows with every
//                   writing, about once a second
//   note/<board>/<rank>  text of a NoteBoard (comm/note_board.h)
//
// Each rank writes its own keys only. <count> grows with every announcement, so
// a reader can tell a new one from one that it saw before; a taken back one is
// gone from the store when Retract returns.
//
// A store that is gone (rank 0 hosted it and has ended), or that does not
// answer within a second, counts as silent. The end of a peer's process is
// noticed elsewhere: comm/watch/liveness_monitor.h. All judgements by time in a
// failure domain use the clock of its Announcements.
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_ANNOUNCEMENTS_H_
#define COMM_WATCH_ANNOUNCEMENTS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/rendezvous/bounded_store.h"
#include "comm/watch/liveness_monitor.h"

namespace c10d {
class Store;
}

namespace tessera {

struct Announcement {
  int rank = 0;  // who posted it
  int64_t count = 0;
  bool standing = false;  // not taken back
  // That rank's communicator has failed for good; nothing takes this back.
  bool final = false;
  absl::Status status;  // for the user, names the rank where the trouble began
};

// The collective that a rank is in, or was in last.
struct WaitingIn {
  int64_t sequence = 0;
  uint32_t signature = 0;
  std::string what;
  std::string details;    // "all-reduce sum, 4000 bytes of float32"
  bool finished = false;  // the rank is out of it
  int64_t beat = 0;       // as read; a rank whose beat stands still is silent
  std::string group;      // whose collective it is; "" is that of all ranks
  // By group: the number of the last collective that was begun.
  std::map<std::string, int64_t> begun;

  // Has whoever is here also begun `other`, or one after it?
  bool HasBegun(const WaitingIn& other) const;
  // "unit a #41 (all-reduce sum, 4000 bytes of float32)"
  std::string Name() const;
};

// Returns true for an error of a rank itself, not of a peer or the network.
bool IsOwnError(const absl::Status& status);

// What all ranks have written, as of one moment where the store can do that.
struct AnnouncementSnapshot {
  std::vector<Announcement> posted;  // what stands, lowest rank first
  std::vector<std::optional<WaitingIn>> waiting;  // by rank
};

class Announcements {
 public:
  // Writes this rank's keys. All ranks must have come back from here
  // before any of them reads. LOCAL. Returns Unavailable if the store fails.
  // `same_host`: all ranks run on this one.
  static absl::StatusOr<std::unique_ptr<Announcements>> Create(
      c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
      bool same_host = false, Clock clock = MonotonicNow);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  absl::Duration Now() const { return clock_(); }

  // "rank 2 failed: <status's message>", Unavailable: how the others read of an
  // error of this rank.
  absl::Status FailedHere(const absl::Status& status) const;

  // Announces `status`, replacing what this rank posted before. A final
  // announcement stays: later calls do nothing. LOCAL.
  void Post(const absl::Status& status, bool final);
  // Announces for good that this rank's groups have failed: its own error as
  // FailedHere, another rank's as it was announced. LOCAL.
  void PostFailure(const absl::Status& status);
  void Retract();
  // Whether this rank's announcement stands.
  bool has_posted() const { return !posted().ok(); }
  // Returns this rank's announcement; OK without one.
  absl::Status posted() const;
  // Returns the standing announcements of the other ranks, lowest rank first.
  // LOCAL.
  std::vector<Announcement> Read();

  // Since this rank's last Post: has every other rank announced something, or
  // had it then? Also if it was taken back since. Waits for that, `timeout` at
  // most, and not for a rank that has ended and posted nothing. Of `ranks`
  // only, unless that is empty. LOCAL.
  bool AllPosted(absl::Duration timeout, const std::vector<int>& ranks = {});

  // False if the store is gone.
  bool SetWaiting(const WaitingIn& waiting);

  // Reads all of the other ranks' keys, without this rank's; nullopt if the
  // store is silent. LOCAL.
  std::optional<AnnouncementSnapshot> ReadSnapshot();

  // Carry out NoteBoard's calls. REQUIRES for reading: all of `ranks` have
  // written.
  bool WriteNote(const std::string& board, const std::string& text);
  std::optional<std::vector<std::string>> ReadNotes(
      const std::string& board, const std::vector<int>& ranks);

  // Whether the store's answer is overdue.
  bool store_silent() const { return store_.silent(); }

  // The monitor of ranks' processes.
  const LivenessMonitor& liveness() const { return *liveness_; }

 private:
  Announcements(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                Clock clock);
  // Reads the announcements of all ranks: the own entry, and those not known to
  // be empty.
  std::vector<Announcement> ReadAll();

  const Clock clock_;
  BoundedStore store_;
  std::unique_ptr<LivenessMonitor> liveness_;
  const int rank_;
  const int world_size_;
  std::atomic<int64_t> beat_{0};
  mutable absl::Mutex mutex_;  // orders the writes of this rank
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status posted_ ABSL_GUARDED_BY(mutex_);
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  // What the others had posted when this rank last did.
  std::vector<Announcement> before_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_WATCH_ANNOUNCEMENTS_H_
