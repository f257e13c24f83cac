// Are writes of the user's into parameters the same on the ranks that must have
// them? Gradients have the same bits on all ranks, and so have the steps: such
// writes are all that could part ranks.
#ifndef ENGINE_MODEL_WRITE_CHECKS_H_
#define ENGINE_MODEL_WRITE_CHECKS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/sharded_model.h"

namespace tessera {

class WriteChecks {
 public:
  // `model` outlives this. `check_writes`: of the configuration.
  WriteChecks(const ShardedModel* model, bool check_writes)
      : model_(model), check_writes_(check_writes) {}

  // With sharding.shard_group_size: units that some rank has written to are
  // compared between replicas, until they are equal. REQUIRES: within an
  // ExclusiveScope. FailedPrecondition, the same on all ranks. COLLECTIVE: one
  // small exchange, two if anything was written.
  absl::Status CheckReplicas();

  // What operators wrote at places that depend on their input since the last
  // Backward (sharding/flat/placed_writes.h), and replicas as CheckReplicas:
  // who saves wants ranks that hold the same. REQUIRES, errors: as that.
  // COLLECTIVE: one small exchange more.
  absl::Status CheckBeforeSave();

  // With sharding.check_writes: what was written since the last call is the
  // same on all ranks. FailedPrecondition, the same on all. COLLECTIVE.
  absl::Status CheckWrites();

 private:
  absl::StatusOr<bool> NoteWritten();

  const ShardedModel* const model_;
  const bool check_writes_;
  // By flat: written to since replicas were last seen to be equal, somewhere.
  std::vector<bool> unverified_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_WRITE_CHECKS_H_
