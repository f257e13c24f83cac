// Summoning: a flat parameter that Engine::Summon (engine/values/summoned.h)
// holds whole, to be written to by any means, and what was written kept or
// taken back. A view of the flat, without state of its own.
//
// REQUIRES of all: FlatParameter::PrepareUpdate before Begin or BeginElsewhere,
// so that nothing else was written.
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

  // Pins the flat and lets it be written to. COLLECTIVE as Pin. On an error
  // nothing is held.
  absl::Status Begin();
  // FailedPrecondition if somebody else holds it, too. LOCAL.
  absl::Status CheckAlone();
  // Ends what Begin began; the next update takes what was written, or the
  // values are those of before. LOCAL.
  void End(bool keep_writes);

  // `rank` alone will hold it: takes part in the gather that it needs, if it
  // needs others; the flat cannot be pinned here then. COLLECTIVE as Pin.
  absl::Status BeginElsewhere(int rank);
  // Ends that.
  void EndElsewhere();
  // Where another rank held it: memory for BroadcastWritten, and that nobody
  // holds the flat. LOCAL. ResourceExhausted, FailedPrecondition.
  absl::Status PrepareReceive();
  // After PrepareReceive, if BroadcastWritten is not to be. LOCAL.
  void DropReceived();

  // `root`'s values become those of all ranks of all shard groups, by which
  // `root` is numbered, as if all had written them: for the next update to
  // take. COLLECTIVE. An error is the group's end.
  absl::Status BroadcastWritten(int root);

 private:
  absl::Status Save();
  void TakeBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(flat_.mutex_);

  FlatParameter& flat_;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_SUMMONING_H_
