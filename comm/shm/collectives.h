// Collectives: the operations of a Team, on plain memory. How ranks read each
// other's: exchange.h, which also has the errors.
//
// Sums run in rank order, for every size, window and alignment.
//
// Threads: one at a time. All calls are COLLECTIVE and blocking.
#ifndef COMM_SHM_COLLECTIVES_H_
#define COMM_SHM_COLLECTIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/exchange.h"
#include "comm/shm/team.h"

namespace tessera::shm {

class Collectives {
 public:
  // As of Exchange.
  explicit Collectives(Team* team) : exchange_(team) {}

  // out[p] = rank p's `in`, `bytes` each. `in` may be the own place in `out`.
  absl::Status AllGather(absl::string_view what, const void* in, void* out,
                         int64_t bytes);
  // out = sum over ranks p of p's in[rank * numel ...], or its average: that is
  // each rank's own matter. `out` may be the own slice of `in`.
  absl::Status ReduceScatter(absl::string_view what, ElementType type,
                             ReduceOp op, const void* in, void* out,
                             int64_t numel);
  // data = sum over ranks of theirs.
  absl::Status AllReduce(absl::string_view what, ElementType type, void* data,
                         int64_t numel);
  absl::Status Broadcast(absl::string_view what, void* data, int64_t bytes,
                         int root);
  // What only moves parts from rank to rank: in[p], of which only what is to be
  // sent has to be there (null: nothing), goes to rank p; out[p] is what comes
  // from it (null: nothing may). Each has `bytes`; those of `in` that are not
  // null lie one after the other. FailedPrecondition where a rank expects what
  // no rank sends, or is sent what it does not expect.
  absl::Status MoveParts(absl::string_view what, CollectiveOp op,
                         const std::vector<const char*>& in,
                         const std::vector<char*>& out, int64_t bytes);
  absl::Status Barrier(absl::string_view what);
  // By rank; lengths may differ.
  absl::Status AllGatherTexts(absl::string_view what, absl::string_view mine,
                              std::vector<std::string>* texts);

  // For operations of others.
  Exchange& exchange() { return exchange_; }

 private:
  absl::Status SumInTwoHalves(Collective* call, char* data, int64_t numel);

  Exchange exchange_;
};

}  // namespace tessera::shm
#endif  // COMM_SHM_COLLECTIVES_H_
