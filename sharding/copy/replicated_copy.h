// ReplicatedCopy: the whole flat on every rank. Where the optimizer is sharded,
// owners' new values reach the other ranks by an all-gather after the step.
#ifndef SHARDING_COPY_REPLICATED_COPY_H_
#define SHARDING_COPY_REPLICATED_COPY_H_

#include <memory>

#include "sharding/copy/working_copy.h"

namespace tessera {

class ReplicatedCopy : public WorkingCopy {
 public:
  static absl::StatusOr<std::unique_ptr<WorkingCopy>> Make(
      const FlatDescription* flat, ShardStates* states);

  void Take(Range slot, const at::Tensor& values) override;
  void Publish(CommFuture updated) override;
  // Save copies the old values: nothing else holds them, since the owners'
  // parts are here, too.
  absl::Status Save() override { return SaveWhole(); }
  void Restore() override { RestoreWhole(); }
  void DropSaved() override { saved_.Reset(); }

 private:
  using WorkingCopy::WorkingCopy;
};

}  // namespace tessera
#endif  // SHARDING_COPY_REPLICATED_COPY_H_
