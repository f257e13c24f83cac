// What a rank does whose own backward failed, before it meets the others; and
// which successful ones fail after all.
//
// Why it cannot just say so in the agreement: where parameters are gathered by
// collectives (stage 3) the others may be inside a gather that this rank will
// not join, and would wait there until their timeout. So it announces its error
// first, which ends their wait. Only if all ranks failed is none of them inside
// a collective, and only then can they agree and go on with the engine.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "sharding/gradient/gradients.h"

namespace tessera {
namespace {

// How long a rank that failed waits for the others to say that they did too.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);

}  // namespace

bool Gradients::AnyGathersTogether() const {
  return options_.together != nullptr ||
         std::any_of(flats_.begin(), flats_.end(), [](const auto& gradient) {
           return gradient->flat().gathers_together();
         });
}

absl::Status Gradients::AgreeOnFailing(const absl::Status& mine) {
  if (mine.ok()) return mine;
  if (!AnyGathersTogether()) {
    return absl::OkStatus();  // the others wait for the reductions only
  }
  everyone().Announce(mine);
  if (everyone().AllAnnounced(kAllFailedWait)) return absl::OkStatus();
  (void)FinishInFlight();
  Discard();
  return mine;
}

bool Gradients::UsedUp() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->used_up(); });
}

// By what all ranks know, so that all of them fail: a rank whose own gradient
// was used up may be another than the one to which more came.
absl::Status Gradients::CheckNoneLate(const FlatGradient& flat,
                                      const std::vector<bool>& came,
                                      const std::vector<bool>& late) const {
  for (size_t i = 0; i < came.size() && running().uses_up; ++i) {
    if (!came[i] || !late[i]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "[", flat.flat().name(), "] parameter '",
        flat.flat().parameters()[i].name,
        "' got another gradient after the unit's were reduced, and the unit "
        "may have been stepped with those (sharding.step_in_backward); leave "
        "that key out for this model"));
  }
  return absl::OkStatus();
}

}  // namespace tessera
