// CountedRanks: stands for a group of ranks in a plan. It counts collectives
// and communicates with nobody; results have their sizes, and as values this
// rank's.
//
// Threads: one at a time.
#ifndef PARALLEL_PLAN_COUNTED_RANKS_H_
#define PARALLEL_PLAN_COUNTED_RANKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

class CountedRanks final : public Communicator {
 public:
  explicit CountedRanks(int ranks) : ranks_(ranks) {}

  int rank() const override { return 0; }
  int world_size() const override { return ranks_; }
  absl::string_view backend() const override { return "plan"; }
  CommFuture Start(CommCall call, CommTag tag) override;
  void Announce(const absl::Status& /*status*/) override {}
  bool AllAnnounced(absl::Duration /*timeout*/) override { return true; }
  void ClearAnnouncement() override {}

  int64_t collectives() const { return collectives_; }
  // Bytes of the tensors that were summed, and of gathered wholes.
  int64_t bytes() const { return bytes_; }
  // Bytes that each rank sends in a ring.
  double sent_bytes() const { return sent_bytes_; }

 private:
  const int ranks_;
  int64_t collectives_ = 0;
  int64_t bytes_ = 0;
  double sent_bytes_ = 0;
};

}  // namespace tessera
#endif  // PARALLEL_PLAN_COUNTED_RANKS_H_
