// CommLog: adds up what the collectives of one communicator cost, by operation
// and by unit.
//
// time      from the begin of a collective on the communication thread to its
//           end there; the wait for slower ranks is in it. Of what a device was
//           given: from the end of the one before on the device to its own.
// alg GB/s  bytes / time, bytes being the whole tensor's.
// bus GB/s  what the busiest link carries, as nccl-tests define it, so that it
//           may be compared between operations and world sizes W:
//           alg * 2 (W-1)/W for all-reduce, * (W-1)/W for all-gather,
//           reduce-scatter and all-to-all, * 1 for broadcast and send-receive.
//           GB are 10^9 bytes.
//
// Pulls (comm/shard_server.h) stand among them: bytes are those that came from
// others, and several may have been under way at a time.
//
// Always on: one short lock and a look-up for each collective. While a trace is
// recorded (base/trace/trace.h) each is a span of it, too.
//
// Threads: all calls may come from any thread.
#ifndef COMM_RECORD_COMM_LOG_H_
#define COMM_RECORD_COMM_LOG_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/record/flight_recorder.h"

namespace tessera {

class CommLog {
 public:
  // More units than these are counted together, as "(others)".
  static constexpr size_t kMaxUnits = 1000;

  struct Options {
    int rank = 0;
    int world_size = 1;
    std::string group;  // its name; "" if of all ranks
  };
  explicit CommLog(Options options);

  // Adds a collective that has ended.
  void Add(const CollectiveRecord& record);
  // Adds the time that a collective was blocked until the first bytes of `peer`
  // came.
  void AddWait(int peer, absl::Duration waited);

  // By rank; empty if AddWait was never called.
  std::vector<absl::Duration> waits() const;

  // Returns the tables, for people. Of the units it leaves out those with less
  // than `least_share` of the time of all collectives, unless some of theirs
  // failed, and says how many these are.
  std::string ToText(absl::string_view backend, double least_share = 0) const;

 private:
  struct Sum {
    int64_t calls = 0;
    int64_t failed = 0;
    int64_t bytes = 0;
    absl::Duration total, longest;
    void Add(const Sum& other);
  };
  using Sums = std::map<std::pair<std::string, CollectiveOp>, Sum>;

  void AddRow(absl::string_view name, CollectiveOp op, const Sum& sum,
              std::string* text) const;

  const Options options_;
  const absl::Duration begin_;
  mutable absl::Mutex mutex_;
  Sums units_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Duration> waits_ ABSL_GUARDED_BY(mutex_);
};

// Returns the factor from algorithm to bus bandwidth.
double BusFactor(CollectiveOp op, int world_size);

// Writes `report` of rank 0 where TESSERA_COMM_LOG=path says, or - for stderr.
// LOCAL. Returns an error that names the file.
absl::Status WriteCommLog(const std::string& report, int rank);

}  // namespace tessera
#endif  // COMM_RECORD_COMM_LOG_H_
