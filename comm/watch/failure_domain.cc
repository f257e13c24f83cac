// Why groups of one job fail together: a rank that gives up one group's
// collective will not come to the next of another group either, and whoever
// waits there would only know after the timeout. So what ends the waits of one
// ends those of all, with the same status.
#include "comm/watch/failure_domain.h"

#include "base/status.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<FailureDomain>> FailureDomain::Join(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options,
    bool same_host) {
  if (options.domain != nullptr) return options.domain;
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<Announcements> announcements,
      Announcements::Create(store, options.rank, options.world_size,
                            same_host));
  auto domain =
      std::make_shared<FailureDomain>(options, std::move(announcements));
  TESSERA_RETURN_IF_ERROR(domain->monitor().watching());
  return domain;
}

WaitMonitor& FailureDomain::device_monitor() {
  absl::MutexLock lock(&mutex_);
  if (device_monitor_ == nullptr) {
    WaitMonitor::Options options;
    options.timeout = collective_timeout_;
    options.grace = absl::InfiniteDuration();
    options.publishes = false;
    device_monitor_ =
        std::make_unique<WaitMonitor>(announcements_.get(), options);
  }
  return *device_monitor_;
}

absl::Status FailureDomain::EndOf(int rank) const {
  for (const EndedRank& ended : announcements_->liveness().Ended()) {
    if (ended.rank == rank) return HasEnded(rank, ended.left);
  }
  return absl::OkStatus();
}

absl::Status FailureDomain::TroubleOf(const std::vector<int>& ranks) {
  const std::vector<Announcement> all = announcements_->Read();
  for (int rank : ranks) {
    for (const Announcement& posted : all) {
      if (posted.rank == rank) return posted.status;
    }
    TESSERA_RETURN_IF_ERROR(EndOf(rank));
  }
  return absl::OkStatus();
}

}  // namespace tessera
