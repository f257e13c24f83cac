// Collectives: all operations of a Team, on plain memory. How ranks read each
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
#include "absl/types/span.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/exchange.h"
#include "comm/shm/team.h"

namespace tessera::shm {

class Collectives {
 public:
  // As of Exchange.
  explicit Collectives(Team* team) : exchange_(team) {}

  // out[p] = rank p's `in`, `bytes` each. `in` may be the own part of `out`.
  absl::Status AllGather(absl::string_view what, const void* in, void* out,
                         int64_t bytes);
  // The same with a place for each rank's.
  absl::Status AllGather(absl::string_view what, const void* in,
                         absl::Span<void* const> places, int64_t bytes);
  // out = fold over ranks p of p's in[rank * numel ...]. `out` may be the own
  // part of `in`. `averages`: of a sum, this rank, whatever the others do,
  // makes the average.
  absl::Status ReduceScatter(absl::string_view what, ElementType type,
                             ReduceOp op, const void* in, void* out,
                             int64_t numel, bool averages = false);
  absl::Status AllReduce(absl::string_view what, ElementType type, ReduceOp op,
                         void* data, int64_t numel);
  // `data` of the root only is written.
  absl::Status Reduce(absl::string_view what, ElementType type, ReduceOp op,
                      void* data, int64_t numel, int root);
  absl::Status Broadcast(absl::string_view what, void* data, int64_t bytes,
                         int root);
  // `places`, one for each rank's, on the root only.
  absl::Status Gather(absl::string_view what, const void* in,
                      absl::Span<void* const> places, int64_t bytes, int root);
  // `in`, [W * bytes], on the root only.
  absl::Status Scatter(absl::string_view what, const void* in, void* out,
                       int64_t bytes, int root);
  // Row p of `in` goes to rank p; what comes from rank p goes to places[p].
  // The rows of `in` lie one after the other. InvalidArgument, on all ranks, if
  // a rank's row for another is not as long as that one expects.
  absl::Status AllToAll(absl::string_view what, const void* in,
                        absl::Span<const int64_t> in_row_bytes,
                        absl::Span<void* const> places,
                        absl::Span<const int64_t> out_row_bytes);
  absl::Status Barrier(absl::string_view what);
  // By rank; lengths may differ.
  absl::Status AllGatherTexts(absl::string_view what, absl::string_view mine,
                              std::vector<std::string>* texts);

  // For operations of others.
  Exchange& exchange() { return exchange_; }

 private:
  absl::Status ReduceInTwoHalves(Collective* call, char* data, int64_t numel,
                                 bool wanted);
  absl::Status CheckRowLengths(absl::string_view what) const;

  Exchange exchange_;
};

}  // namespace tessera::shm
#endif  // COMM_SHM_COLLECTIVES_H_
