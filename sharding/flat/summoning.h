// Summoning: holds a flat parameter whole for Engine::Summon
// (engine/values/summoned.h), to be written to by any means, and keeps or
// discards what was written. It is a view of the flat, without state of its
// own.
//
// REQUIRES, for all calls: FlatParameter::PrepareUpdate before Begin or
// BeginElsewhere, so that nothing else was written.
//
// Threads: any.
#ifndef SHARDING_FLAT_SUMMONING_H_
#define SHARDING_FLAT_SUMMONING_H_

#include "absl/status/status.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class Summoning {
 public:
  explicit Summoning(FlatParameter* flat) : flat_(*flat) {}

  // Pins the flat and allows writes to it. COLLECTIVE where Pin is. On an error
  // nothing is held.
  absl::Status Begin();
  // Returns FailedPrecondition if something else holds the flat, too. LOCAL.
  absl::Status CheckAlone();
  // Ends what Begin began: the next update takes what was written, or the old
  // values are restored. LOCAL.
  void End(bool keep_writes);

  // Takes part in the gather of `rank`, which alone will hold the flat, if it
  // needs other ranks; the flat cannot be pinned here then. COLLECTIVE where
  // Pin is.
  absl::Status BeginElsewhere(int rank);
  // Ends what BeginElsewhere began.
  void EndElsewhere();
  // Takes memory for BroadcastWritten where another rank held the flat, and
  // checks that nobody holds it here. LOCAL. ResourceExhausted,
  // FailedPrecondition.
  absl::Status PrepareReceive();
  // Undoes PrepareReceive, if there will be no BroadcastWritten. LOCAL.
  void DropReceived();

  // Makes `root`'s values those of all ranks of all shard groups, as if all had
  // written them; the next update takes them. `root` is numbered over all these
  // ranks. COLLECTIVE. After an error the group is unusable.
  absl::Status BroadcastWritten(int root);

 private:
  absl::Status Save();
  void TakeBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(flat_.mutex_);

  FlatParameter& flat_;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_SUMMONING_H_
