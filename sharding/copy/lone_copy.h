// LoneCopy: the whole flat, in the memory of its shard: of a rank of the CPU
// that is alone in its shard group at stage 3. Nothing is gathered or copied,
// and nothing is held twice. Between its uses the flat counts as freed all the
// same, so that an access outside of an operator throws as it would with more
// ranks, whose programs are written on one.
//
// A user's write goes to the shard at once. Where Engine::Offload has moved the
// shard away, it is read to memory for each use, as GatheredCopy does it.
#ifndef SHARDING_COPY_LONE_COPY_H_
#define SHARDING_COPY_LONE_COPY_H_

#include <atomic>

#include "sharding/copy/sharded_copy.h"

namespace tessera {

class LoneCopy : public GatheredCopy {
 public:
  LoneCopy(const FlatDescription* flat, ShardStates* states,
           std::atomic<int64_t>* live)
      : GatheredCopy(flat, states, Traits(), live) {}

  // The values of before are nowhere else.
  absl::Status Save() override;
  void Restore() override { RestoreWhole(); }
  void DropSaved() override { saved_.Reset(); }

 private:
  absl::StatusOr<FlatBuffer> AllocateWhole() override;
  absl::StatusOr<CommFuture> Launch() override;
};

}  // namespace tessera
#endif  // SHARDING_COPY_LONE_COPY_H_
