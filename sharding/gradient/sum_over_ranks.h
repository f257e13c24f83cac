// The one sum over all ranks that gradients take.
//
//   ranks 0 1 2 3, shard groups of 2
//
//   within a group     sum of ranks 0, 1 | sum of ranks 2, 3   reduce-scatter
//   over its replicas  (0 + 1) + (2 + 3)                       all-reduce
//
// Each of the two runs in rank order and rounds to the tensor's dtype as
// comm/communicator.h says; so all replicas have the same bits, and these are
// others than those of one group of all ranks.
#ifndef SHARDING_GRADIENT_SUM_OVER_RANKS_H_
#define SHARDING_GRADIENT_SUM_OVER_RANKS_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "comm/communicator.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// The end of a sum. A default-constructed one is done.
struct SumOverRanks {
  CommFuture within_group, over_replicas;
  double divided_by = 1;  // already, of what was asked for
  absl::Status Wait() const;
};

// mine = the sum over all ranks of this rank's part of `whole`: [W * S] and
// [S], W the shard group of `flat`; where its optimizer is not sharded, both
// are all of it. `mine` may be the own part of `whole`, which is left in any
// state. A sum that is to be divided by `divisor` may come back divided
// already: see divided_by. COLLECTIVE, ASYNC.
SumOverRanks StartSum(const FlatParameter& flat, const at::Tensor& whole,
                      const at::Tensor& mine, const CommTag& tag,
                      double divisor = 1);

}  // namespace tessera
#endif  // SHARDING_GRADIENT_SUM_OVER_RANKS_H_
