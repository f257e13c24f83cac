// Are writes of the user's into parameters the same on the ranks that must have
// them? Gradients have the same bits on all ranks, and so have the steps: such
// writes are all that could part ranks.
#ifndef ENGINE_PARTS_WRITE_CHECKS_H_
#define ENGINE_PARTS_WRITE_CHECKS_H_

#include "absl/status/status.h"
#include "engine/parts/engine_parts.h"

namespace tessera {

// With sharding.shard_group_size: units that some rank has written to are
// compared between replicas, until they are equal. REQUIRES: within an
// ExclusiveScope. FailedPrecondition, the same on all ranks. COLLECTIVE: one
// small exchange, two if anything was written.
absl::Status CheckReplicas(EngineParts* parts);

// What operators wrote at places that depend on their input since the last
// Backward (sharding/flat/placed_writes.h), and replicas as CheckReplicas: who
// saves wants ranks that hold the same. REQUIRES, errors: as that. COLLECTIVE:
// one small exchange more.
absl::Status CheckBeforeSave(EngineParts* parts);

// With sharding.check_writes: what was written since the last call is the same
// on all ranks. FailedPrecondition, the same on all. COLLECTIVE.
absl::Status CheckWrites(EngineParts* parts);

}  // namespace tessera
#endif  // ENGINE_PARTS_WRITE_CHECKS_H_
