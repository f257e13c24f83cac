// What ranks know of a start that fails: why, as one of them or the launcher
// has put it into the store ("failure"), and, where nobody watches their
// processes, which of them are alive ("alive/<rank>", in which each counts as
// long as it connects; one whose count stands still has ended, or is stopped).
//
// Everything here blocks as long as the store does not answer.
#ifndef COMM_RENDEZVOUS_START_WATCH_H_
#define COMM_RENDEZVOUS_START_WATCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Store;
}

namespace tessera {

// Text in errors of the store itself.
inline constexpr char kStoreError[] =
    "the store, or rank 0 that hosts it, is gone";

// Tells all ranks why the start of the job fails; the first one holds. An error
// means that the ranks cannot be reached; they will see that one is gone.
// Where the store goes with this process, as `hosts_store` says, this waits
// until they have heard it. LOCAL.
void PutFailure(c10d::Store& store, const absl::Status& status,
                bool hosts_store);

// OK, or why the start of the job has failed, as the launcher or a rank has put
// it there. LOCAL.
absl::Status StartFailure(c10d::Store& store);

// What to say of a start that ended here with `status`, an error. A transport
// that cannot connect (Internal) or has lost a link (Unavailable) does not know
// which rank ended first; the launcher soon does, and is waited for, a fraction
// of a second. LOCAL.
absl::Status WithStartFailure(const absl::Status& status, c10d::Store& store);

// Threads: one.
class StartWatch {
 public:
  // How long a rank that lives may not count.
  static constexpr absl::Duration kSilence = absl::Milliseconds(700);

  // `store`: a client that nobody else uses meanwhile; a question would wait
  // until another's has been answered.
  StartWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  // Counts, a few times per second, and returns StartFailure. LOCAL.
  absl::Status Look();

  // Notes how far all have counted; the first call counts. LOCAL.
  absl::Status NoteCounts();
  // The ranks that have not counted for 0.7 s, since NoteCounts if that was so
  // long ago; otherwise this waits, and counts meanwhile. Or the StartFailure
  // that has come. LOCAL.
  absl::StatusOr<std::vector<int>> SilentRanks();

 private:
  std::vector<int64_t> Counts();

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  Deadline count_at_ = Deadline::After(absl::ZeroDuration());
  Deadline silence_ = Deadline::Never();  // of those that have not counted
  std::vector<int64_t> noted_;
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_START_WATCH_H_
