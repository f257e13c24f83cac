// SumOverRanks: the sum of gradients over all ranks.
//
//   ranks 0 1 2 3, shard groups of 2
//
//   within a group     sum of ranks 0, 1 | sum of ranks 2, 3   reduce-scatter
//   over its replicas  (0 + 1) + (2 + 3)                       all-reduce
//
// Both sums run in rank order and round to the tensor's dtype as
// comm/communicator.h says. So all replicas have the same bits, which differ
// from those of a single group of all ranks.
#ifndef SHARDING_GRADIENT_SUM_OVER_RANKS_H_
#define SHARDING_GRADIENT_SUM_OVER_RANKS_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "comm/communicator.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// A sum in progress. A default-constructed one is done.
struct SumOverRanks {
  CommFuture within_group, over_replicas;
  double divided_by = 1;  // the part of `divisor` that is divided already
  absl::Status Wait() const;
};

// Starts to set `mine` to the sum over all ranks of this rank's part of
// `whole`: [S] of [W * S], W the size of the shard group of `flat`; where its
// optimizer is not sharded, both are the whole flat. `mine` may be this rank's
// part of `whole`, whose contents are unspecified afterwards. The sum may be
// divided by `divisor` already: see divided_by. COLLECTIVE, ASYNC.
SumOverRanks StartSum(const FlatParameter& flat, const at::Tensor& whole,
                      const at::Tensor& mine, const CommTag& tag,
                      double divisor = 1);

}  // namespace tessera
#endif  // SHARDING_GRADIENT_SUM_OVER_RANKS_H_
