// What saves have cost, and how often they are then made.
#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "engine/checkpoint_manager.h"

namespace tessera {

absl::Duration OptimalSaveInterval(absl::Duration save,
                                   absl::Duration mean_time_between_failures) {
  const double cost = absl::ToDoubleSeconds(save);
  const double mean = absl::ToDoubleSeconds(mean_time_between_failures);
  if (cost >= 2 * mean) return mean_time_between_failures;
  const double ratio = cost / (2 * mean);
  return absl::Seconds(std::sqrt(2 * cost * mean) *
                           (1 + std::sqrt(ratio) / 3 + ratio / 9) -
                       cost);
}

absl::Duration CheckpointManager::Interval() const {
  absl::Duration interval = *options_.every;
  if (*options_.mean_time_between_failures > absl::ZeroDuration() &&
      saves_ > 0) {
    const absl::Duration best = OptimalSaveInterval(
        cost_ / saves_, *options_.mean_time_between_failures);
    interval =
        interval == absl::ZeroDuration() ? best : std::min(interval, best);
  }
  return interval;
}

void CheckpointManager::NoteCost(absl::Duration cost) {
  last_save_ = options_.clock();
  cost_ += cost;
  ++saves_;
  // Means of costs differ by a little each time.
  const absl::Duration interval = Interval();
  if (*options_.mean_time_between_failures > absl::ZeroDuration() &&
      absl::AbsDuration(interval - logged_interval_) > logged_interval_ / 10) {
    LogReport();
  }
}

void CheckpointManager::LogReport() {
  logged_interval_ = Interval();
  TESSERA_LOG_RANK0(INFO) << options_.dir << ": " << Report();
}

std::string CheckpointManager::Report() const {
  if (saves_ == 0) {
    return last_->step < 0 ? "no checkpoint saved"
                           : absl::StrCat("nothing to save, step ", last_->step,
                                          " is saved already");
  }
  std::string report = absl::StrCat(
      saves_, saves_ == 1 ? " save, " : " saves, ", "blocking training for ",
      absl::FormatDuration(absl::Trunc(cost_ / saves_, absl::Milliseconds(1))),
      saves_ == 1 ? "" : " each");
  const absl::Duration interval = Interval();
  if (interval > absl::ZeroDuration()) {
    absl::StrAppend(
        &report, "; one every ",
        absl::FormatDuration(absl::Trunc(interval, absl::Seconds(1))));
  }
  return report;
}

}  // namespace tessera
