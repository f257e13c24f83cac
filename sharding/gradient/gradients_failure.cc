// What a rank does whose own backward failed, before it meets the others.
//
// Why it cannot just say so in the agreement: where parameters are gathered by
// collectives (stage 3) the others may be inside a gather that this rank will
// not join, and would wait there until their timeout. So it announces its error
// first, which ends their wait. Only if all ranks failed is none of them inside
// a collective, and only then can they agree and go on with the engine.
#include <algorithm>

#include "absl/time/time.h"
#include "sharding/gradient/gradients.h"

namespace tessera {
namespace {

// How long a rank that failed waits for the others to say that they did too.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);

}  // namespace

bool Gradients::AnyGathersTogether() const {
  return std::any_of(flats_.begin(), flats_.end(), [](const auto& gradient) {
    return gradient->flat().gathers_together();
  });
}

absl::Status Gradients::AgreeOnFailing(const absl::Status& mine) {
  if (mine.ok()) return mine;
  if (!AnyGathersTogether()) {
    return absl::OkStatus();  // the others wait for the reductions only
  }
  comm_->Announce(mine);
  if (comm_->AllAnnounced(kAllFailedWait)) return absl::OkStatus();
  (void)FinishInFlight();
  Discard();
  return mine;
}

}  // namespace tessera
