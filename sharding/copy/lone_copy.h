// LoneCopy: the whole flat in the memory of its shard, for a rank on the CPU
// that is alone in its shard group at stage 3. Nothing is gathered, copied, or
// held twice. Between uses the flat still counts as freed, so that an access
// outside of an operator throws as it would with more ranks: programs for many
// ranks are developed on one.
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

  // The old values are nowhere else, so Save copies them.
  absl::Status Save() override;
  void Restore() override { RestoreWhole(); }
  void DropSaved() override { saved_.Reset(); }

 private:
  absl::StatusOr<FlatBuffer> AllocateWhole() override;
  absl::StatusOr<CommFuture> Launch() override;
};

}  // namespace tessera
#endif  // SHARDING_COPY_LONE_COPY_H_
