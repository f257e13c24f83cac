// Note [Ranks give up the same]
// What is computed again gathers units in the order of the forward, what is
// kept in that of the backward. Where gathers are collectives a rank that keeps
// a module which the others give up would meet them in another gather. So what
// decides is agreed on, when a module's forward ends for the first time:
// whether its tape can be run and makes the same bits, and how much it counts
// for the budget, which ranks with fewer samples would fill later. Ranks that
// go on to run other operators than each other are told so by their gathers.
#include "sharding/recompute/recomputed_module.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"

namespace tessera {
namespace {

// What a peer, the memory or a deadline does is not the module's fault.
bool OfTheModule(const absl::Status& error) {
  return !absl::IsUnavailable(error) && !absl::IsResourceExhausted(error) &&
         !absl::IsDeadlineExceeded(error) && !absl::IsAborted(error) &&
         !absl::IsCancelled(error);
}

}  // namespace

void RecomputedUnits::Module::Close(Region* region) {
  // No forward: a program looks at parameters, or writes them.
  if (!region->saved()) return region->KeepAll(nullptr);
  if (!shared_->options.recomputes) return Move(region);
  const int64_t bytes = region->Prepare();
  std::string unable = region->spoilt();
  if (!closed_.exchange(true)) AgreeAtFirst(bytes, &unable);
  if (!unable.empty()) Keep(unable);
  std::shared_ptr<void> token;
  // A rank without rows takes part where others have some.
  const int64_t counted = agreed_bytes_ > 0 ? agreed_bytes_.load() : bytes;
  if (counted > 0 && !is_kept_) {
    token = shared_->TryKeep(counted);
    if (token == nullptr && Check(region)) return GiveUp(region, bytes);
  }
  KeepAll(region, bytes, token);
}

void RecomputedUnits::Module::KeepAll(Region* region, int64_t bytes,
                                      const std::shared_ptr<void>& token) {
  region->KeepAll(token);
  if (bytes == 0) return;
  absl::MutexLock lock(&shared_->mutex);
  ++shared_->report.kept;
}

Communicator* RecomputedUnits::Module::Group() const {
  for (const FlatParameter* flat : flats_) {
    if (!flat->can_be_freed() || !flat->gathers_together()) continue;
    if (flat->communicator()->world_size() > 1) return flat->communicator();
  }
  return nullptr;
}

void RecomputedUnits::Module::AgreeAtFirst(int64_t bytes, std::string* unable) {
  Communicator* const group = Group();
  if (group == nullptr) return;
  const auto all = AllGatherValueAndText(
      group, bytes, *unable, {absl::StrCat("activations of ", name_)});
  ThrowIfError(all.status());
  for (size_t rank = 0; rank < all->size(); ++rank) {
    const auto& theirs = (*all)[rank];
    agreed_bytes_ = std::max(agreed_bytes_.load(), theirs.value);
    if (!unable->empty() || theirs.text.empty()) continue;
    *unable = absl::StrCat("on rank ", rank, " ", theirs.text);
  }
}

bool RecomputedUnits::Module::Check(Region* region) {
  const ReplayChecks checks = shared_->options.checks;
  if (checks == ReplayChecks::kNever) return true;
  bool all_do = checks == ReplayChecks::kAlways;
  {
    absl::MutexLock lock(&shared_->mutex);
    all_do |= verified_.empty();
    if (!all_do && verified_.contains(region->signature())) return true;
  }
  if (!all_do && MayGather()) return false;
  absl::Status same = region->Verify();
  Communicator* const group = all_do ? Group() : nullptr;
  if (group != nullptr) {
    same = group->AgreeOk(same, absl::StrCat("activations of ", name_));
  }
  if (!same.ok() && !OfTheModule(same)) ThrowIfError(same);
  if (!same.ok()) Keep(same.message());
  absl::MutexLock lock(&shared_->mutex);
  verified_.insert(region->signature());
  return same.ok();
}

bool RecomputedUnits::Module::MayGather() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const FlatParameter* flat) {
                       return flat->can_be_freed() &&
                              flat->gathers_together() && !flat->whole();
                     });
}

void RecomputedUnits::Module::GiveUp(Region* region, int64_t bytes) {
  region->GiveUp();
  if (shared_->options.store != nullptr) region->MoveHeld();
  absl::MutexLock lock(&shared_->mutex);
  ++shared_->report.given_up;
  shared_->report.given_up_bytes += bytes;
}

void RecomputedUnits::Module::Move(Region* region) {
  const int64_t bytes = region->SavedBytes();
  if (auto token = shared_->TryKeep(bytes)) {
    return KeepAll(region, bytes, token);
  }
  region->MoveSaved();
}

void RecomputedUnits::Module::Keep(absl::string_view why) {
  if (is_kept_.exchange(true)) return;
  const std::string text = absl::StrCat("[", name_, "] ", why);
  TESSERA_LOG(WARNING) << text
                       << "; its activations are kept (leave it out of "
                          "activation_checkpointing.units, or use "
                          "tessera::Checkpointed)";
  absl::MutexLock lock(&shared_->mutex);
  shared_->report.unable.push_back(text);
}

}  // namespace tessera
