// Announcements: what ranks tell each other outside of collectives, through the
// store where they met.
//
//   said/<rank>     "<count> <kind> <code> <message>", kind: now, final, past
//   waiting/<rank>  "<sequence> <signature> <what>": a wait that lasts long
//
// Each rank writes its own keys only. <count> grows with every announcement, so
// a reader can tell a new one from one that it saw before; a taken back one is
// gone from the store when TakeBack returns.
//
// A store that is gone (rank 0 hosted it and has ended) reads as silence: to
// see that a peer is gone is the transport's part.
//
// Threads: all calls may come from any thread.
#ifndef COMM_ANNOUNCEMENTS_H_
#define COMM_ANNOUNCEMENTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Store;
}

namespace tessera {

struct Announcement {
  int rank = 0;  // who said it
  int64_t count = 0;
  bool standing = false;  // not taken back
  // The speaker's communicator has failed for good; nothing takes this back.
  bool final = false;
  absl::Status status;  // for the user, names the rank where the trouble began
};

// A long wait: which collective a rank is in.
struct WaitingIn {
  int64_t sequence = 0;
  uint32_t signature = 0;
  std::string what;
};

class Announcements {
 public:
  // Writes this rank's empty keys. All ranks must have come back from here
  // before any of them reads. LOCAL. Returns Unavailable if the store fails.
  static absl::StatusOr<std::unique_ptr<Announcements>> Create(
      c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  // "rank 2 failed: <status's message>", Unavailable: how the others read of an
  // error of this rank.
  absl::Status FailedHere(const absl::Status& status) const;

  // Announces `status`, in the place of what this rank said before. A final
  // one stays: later calls do nothing. LOCAL.
  void Say(const absl::Status& status, bool final);
  void TakeBack();
  // This rank's announcement stands.
  bool speaking() const;
  // What stands, of the other ranks, lowest rank first. LOCAL.
  std::vector<Announcement> Read();

  // Since this rank's last Say: has every other rank announced something, or
  // had it then? Also if it was taken back since. Waits for that, `timeout` at
  // most. LOCAL.
  bool AllSaid(absl::Duration timeout);

  void SetWaiting(const WaitingIn& waiting);
  // By rank; nullopt for a rank that never waited long. LOCAL.
  std::vector<std::optional<WaitingIn>> ReadWaiting();

 private:
  Announcements(c10::intrusive_ptr<c10d::Store> store, int rank,
                int world_size);
  // Returns once the store holds the value, false if the store is gone.
  bool Write(const std::string& key, const std::string& value);
  std::string Read(const std::string& key);
  // Of all ranks; the own entry is empty.
  std::vector<Announcement> ReadAll();

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  mutable absl::Mutex mutex_;  // orders the writes of this rank's words
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool speaking_ ABSL_GUARDED_BY(mutex_) = false;
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  // What the others had said when this rank last spoke.
  std::vector<Announcement> before_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_ANNOUNCEMENTS_H_
