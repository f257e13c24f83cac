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

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
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
  int64_t bytes = region->Prepare(HeldOf(region->signature()));
  std::string unable = region->spoilt();
  if (!closed_.exchange(true)) AgreeAtFirst(bytes, &unable);
  if (!unable.empty()) Keep(unable);
  std::shared_ptr<void> token;
  // A rank without rows takes part where others have some.
  const int64_t counted = agreed_bytes_ > 0 ? agreed_bytes_.load() : bytes;
  if (counted > 0 && !is_kept_) {
    token = shared_->TryKeep(counted);
    if (token == nullptr && Check(region, &bytes)) {
      return GiveUp(region, bytes);
    }
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

std::vector<int> RecomputedUnits::Module::HeldOf(uint64_t signature) const {
  absl::MutexLock lock(&shared_->mutex);
  const auto it = verified_.find(signature);
  return it == verified_.end() ? std::vector<int>() : it->second;
}

bool RecomputedUnits::Module::Check(Region* region, int64_t* bytes) {
  const ReplayChecks checks = shared_->options.checks;
  if (checks == ReplayChecks::kNever) return true;
  bool all_do = checks == ReplayChecks::kAlways;
  {
    absl::MutexLock lock(&shared_->mutex);
    all_do |= verified_.empty();
    if (!all_do && verified_.contains(region->signature())) return true;
  }
  if (!all_do && MayGather()) return false;
  absl::StatusOr<std::vector<int>> other = region->Verify();
  if (Group() != nullptr) {
    other = Agree(std::move(other), region->num_operators(), all_do);
  }
  if (!other.ok() && !OfTheModule(other.status())) {
    ThrowIfError(other.status());
  }
  if (!other.ok()) Keep(other.status().message());
  if (other.ok() && !other->empty()) {
    std::string told;
    *bytes -= region->Hold(*other, &told);
    Tell(told);
  }
  absl::MutexLock lock(&shared_->mutex);
  // With kAlways some may be held already.
  std::vector<int>& held = verified_[region->signature()];
  if (other.ok()) held.insert(held.end(), other->begin(), other->end());
  return other.ok();
}

// All ranks hold what has other bits on any of them.
absl::StatusOr<std::vector<int>> RecomputedUnits::Module::Agree(
    absl::StatusOr<std::vector<int>> other, int num_operators, bool all_do) {
  const auto differ = [](absl::string_view ranks) {
    return absl::DataLossError(
        absl::StrCat("runs other operators than ", ranks,
                     ", and their results have other bits when they are "
                     "recomputed"));
  };
  if (!all_do) {
    return !other.ok() || other->empty() ? other : differ("at first");
  }
  const std::string what = absl::StrCat("activations of ", name_);
  TESSERA_RETURN_IF_ERROR(Group()->AgreeOk(other.status(), what));
  other->insert(other->begin(), num_operators);
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           AllGatherLists(Group(), *other, {what}));
  std::vector<int> any;
  bool same = true;
  for (const std::vector<int>& theirs : all) {
    same &= theirs[0] == all[0][0];
    any.insert(any.end(), theirs.begin() + 1, theirs.end());
  }
  return same || any.empty()
             ? any
             : absl::StatusOr<std::vector<int>>(differ("on other ranks"));
}

void RecomputedUnits::Module::Tell(absl::string_view held) {
  std::string text = absl::StrCat(
      "[", name_,
      "] keeps results that have other bits when they are recomputed: ", held);
  absl::MutexLock lock(&shared_->mutex);
  std::vector<std::string>& told = shared_->report.held;
  const bool known = std::any_of(
      told.begin(), told.end(),
      [&](const std::string& each) { return absl::EndsWith(each, held); });
  if (!known) TESSERA_LOG(INFO) << "activation_checkpointing: " << text;
  told.push_back(std::move(text));
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
