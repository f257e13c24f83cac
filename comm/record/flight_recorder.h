// FlightRecorder: keeps the last 256 collectives of one communicator, for
// reports when something goes wrong.
//
//   caller  Enqueue -> ticket ... communication thread  Enter ... Leave
//   ticket  1 2 3 ... 257 ...     slot = ticket % 256, over the oldest
//
// Cost: one short lock for each of the three calls, no allocation once a slot's
// strings have grown.
//
// Threads: all calls may come from any thread, while collectives run.
#ifndef COMM_RECORD_FLIGHT_RECORDER_H_
#define COMM_RECORD_FLIGHT_RECORDER_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "comm/call_site.h"
#include "comm/collective.h"

namespace tessera {

struct CollectiveRecord {
  CollectiveOp op = CollectiveOp::kText;
  std::string what;   // what it is for: the CommTag's text
  std::string group;  // whose collective it is; "" if of all ranks
  // Bytes of the whole tensor; of this rank's own string for kText; of what
  // comes from others for kPull.
  int64_t bytes = 0;
  const char* dtype = "";   // "float32"; "" where there is no tensor
  const char* reduce = "";  // "sum", ...; "" where nothing is reduced
  int root = -1;            // where there is one
  CallSite site;

  int64_t ticket = 0;    // counts calls, from 1
  int64_t sequence = 0;  // counts collectives that were begun; 0: not yet
  // MonotonicNow() of the call, of its begin and end on the communication
  // thread; zero: not yet.
  absl::Duration enqueued, entered, left;
  absl::Status status;

  // "gradient of unit a of group nodes 1.0": what and group.
  std::string Title() const;
  // "all-reduce sum, 4000 bytes of float32"; what ranks must agree on.
  std::string Describe() const;
};

class FlightRecorder {
 public:
  static constexpr int kNumKept = 256;

  FlightRecorder();
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Keeps a copy of `record`, with its ticket and time, and returns the ticket.
  int64_t Enqueue(const CollectiveRecord& record);
  // The others of a ticket that is not kept any more do nothing.
  void Enter(int64_t ticket, int64_t sequence);
  void Leave(int64_t ticket, const absl::Status& status);

  // What is kept, oldest first.
  std::vector<CollectiveRecord> Snapshot() const;

  // A table of what is kept, or of the `last` ones:
  //   #41   done     3.1 ms   2.0 s ago  all-gather, 64 bytes of float32
  //                                      unit layers.7
  //                                      sharding/flat/flat_parameter.cc:153
  std::string ToText(int last = kNumKept) const;

  // The tables of all recorders of this process. `wait` false: leaves out those
  // that another thread holds just now (this thread may hold any lock).
  static std::string AllToText(bool wait, int last = kNumKept);

 private:
  CollectiveRecord* Find(int64_t ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<CollectiveRecord> Copy() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  int64_t tickets_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<CollectiveRecord, kNumKept> ring_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_RECORD_FLIGHT_RECORDER_H_
