// The best metric of a run, and the checkpoint that is kept for it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/disk/file_system.h"
#include "base/log.h"
#include "base/status.h"
#include "checkpoint/local_folders.h"
#include "engine/checkpoint_manager.h"
#include "engine/run/best_metric.h"
#include "engine/run/run_folder.h"

namespace tessera {
namespace {

constexpr char kManager[] = "CheckpointManager";

}  // namespace

absl::StatusOr<bool> CheckpointManager::ReportMetric(
    double metric, const ClientState& client_state) {
  TESSERA_RETURN_IF_ERROR(
      comm_->AgreeEqual(absl::StrFormat("%a", metric), "reported metric"));
  const std::string state_before = best_->State();
  const bool better = best_->Report(metric, engine_->step());
  if (better && *options_.keep_best) {
    (void)HowLastEnded();  // whether the one before is on the disk
    const std::string before =
        std::exchange(best_name_, StepFolderName(engine_->step()));
    if (best_before_.empty() && before != best_name_) {
      best_before_ = before;
      before_state_ = state_before;
    }
    if (IsSaved()) {
      TESSERA_RETURN_IF_ERROR(WriteBestOf(best_name_));
      ForgetBestBefore();
    } else {
      TESSERA_RETURN_IF_ERROR(SaveAs(client_state, /*wait=*/false));
    }
  }
  return *options_.patience > 0 && best_->not_better() >= *options_.patience;
}

absl::Status CheckpointManager::WriteBestOf(const std::string& name) {
  const absl::Status written =
      folder_->leads ? WriteBest(options_.dir, name, FileSystem::Real())
                     : absl::OkStatus();
  return comm_->AgreeOk(written, kManager);
}

std::optional<int64_t> CheckpointManager::best_step() const {
  return best_->any() ? std::optional<int64_t>(best_->step()) : std::nullopt;
}
std::optional<double> CheckpointManager::best_metric() const {
  return best_->any() ? std::optional<double>(best_->value()) : std::nullopt;
}

void CheckpointManager::ForgetBestBefore() {
  best_before_.clear();
  before_state_.clear();
}

// The best checkpoint may never have come to the disk: a later save took the
// place of its own, which had failed. Then the one before it is the best that
// is there.
absl::Status CheckpointManager::ResumeBest(
    const std::string& state, const std::vector<std::string>& folders) {
  const std::vector<std::string> states =
      absl::StrSplit(state, absl::MaxSplits('\n', 1));
  const auto is_there = [&] {
    return best_->any() && std::count(folders.begin(), folders.end(),
                                      StepFolderName(best_->step())) > 0;
  };
  TESSERA_RETURN_IF_ERROR(best_->Load(states[0]));
  best_name_.clear();
  ForgetBestBefore();
  if (!*options_.keep_best) return absl::OkStatus();
  if (!is_there() && states.size() > 1) {
    TESSERA_RETURN_IF_ERROR(best_->Load(states[1]));
  }
  if (!is_there()) return absl::OkStatus();
  best_name_ = StepFolderName(best_->step());
  const absl::Status written = WriteBestOf(best_name_);
  if (!written.ok()) TESSERA_LOG_RANK0(WARNING) << written.message();
  return absl::OkStatus();
}

std::string CheckpointManager::StateOfBest() const {
  return before_state_.empty()
             ? best_->State()
             : absl::StrCat(best_->State(), "\n", before_state_);
}

}  // namespace tessera
