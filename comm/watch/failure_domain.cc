#include "comm/watch/failure_domain.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<FailureDomain>> FailureDomain::Join(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options,
    bool same_host) {
  if (options.domain != nullptr) return options.domain;
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<Announcements> board,
      Announcements::Create(store, options.rank, options.world_size,
                            same_host));
  return std::make_shared<FailureDomain>(options, std::move(board));
}

absl::Status FailureDomain::EndOf(int rank) const {
  for (const EndedRank& ended : board_->liveness().Ended()) {
    if (ended.rank == rank) return HasEnded(rank, ended.left);
  }
  return absl::OkStatus();
}

absl::Status FailureDomain::TroubleOf(const std::vector<int>& ranks) {
  const std::vector<Announcement> all = board_->Read();
  for (int rank : ranks) {
    for (const Announcement& said : all) {
      if (said.rank == rank) return said.status;
    }
    TESSERA_RETURN_IF_ERROR(EndOf(rank));
  }
  return absl::OkStatus();
}

absl::Status HasEnded(int rank, bool left) {
  return absl::UnavailableError(
      absl::StrCat("rank ", rank, " has ended (",
                   left ? "it has left this group" : "its process is gone",
                   "); look at that rank's own last words"));
}

}  // namespace tessera
