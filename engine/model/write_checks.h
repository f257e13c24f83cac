// WriteChecks: checks that the user's writes into parameters are identical on
// the ranks that must have them. Gradients and steps have the same bits on all
// ranks, so only such writes can make ranks diverge.
#ifndef ENGINE_MODEL_WRITE_CHECKS_H_
#define ENGINE_MODEL_WRITE_CHECKS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/sharded_model.h"

namespace tessera {

class WriteChecks {
 public:
  // `model` outlives this. `check_writes`: the configuration's
  // sharding.check_writes.
  WriteChecks(const ShardedModel* model, bool check_writes)
      : model_(model), check_writes_(check_writes) {}

  // Checks, with sharding.check_writes, that what was written since the last
  // call is identical on all ranks, and then calls CheckReplicas, with its
  // REQUIRES and errors. COLLECTIVE: one small exchange for each.
  absl::Status CheckBeforeStep();
  // Checks what operators wrote since the last Backward at places that depend
  // on their input (sharding/flat/placed_writes.h), and then calls
  // CheckReplicas, with its REQUIRES and errors. COLLECTIVE: one small exchange
  // more.
  absl::Status CheckBeforeSave();

 private:
  // Compares units that some rank has written to between replicas, until they
  // are equal; does nothing without sharding.shard_group_size. REQUIRES: within
  // an ExclusiveScope. FailedPrecondition, the same on all ranks. COLLECTIVE:
  // one small exchange, two if anything was written.
  absl::Status CheckReplicas();
  absl::Status CheckWrites();
  absl::StatusOr<bool> NoteWritten();

  const ShardedModel* const model_;
  const bool check_writes_;
  // By flat: whether some rank wrote to it since replicas were last seen to be
  // equal.
  std::vector<bool> unverified_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_WRITE_CHECKS_H_
