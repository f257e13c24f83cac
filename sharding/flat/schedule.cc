#include "sharding/flat/schedule.h"

#include <algorithm>
#include <utility>

#include "sharding/flat/flat_parameter.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

// How far ahead the record is looked at, in touches.
constexpr size_t kLookAhead = 32;

Phase CurrentPhase() {
  return torch::autograd::get_current_graph_task_id() == -1 ? Phase::kForward
                                                            : Phase::kBackward;
}

int64_t NumelOf(const FlatParameter* flat) {
  return flat->layout().whole_numel();
}

bool Contains(const std::vector<FlatParameter*>& flats,
              const FlatParameter* flat) {
  return std::find(flats.begin(), flats.end(), flat) != flats.end();
}

}  // namespace

Schedule::Mark Schedule::MarkOf(FlatParameter* flat, Phase phase) {
  return reinterpret_cast<Mark>(flat) | static_cast<Mark>(phase);
}

FlatParameter* Schedule::UnitOf(Mark mark) {
  return reinterpret_cast<FlatParameter*>(mark & ~static_cast<Mark>(1));
}

void Schedule::Start(std::vector<FlatParameter*> flats) {
  absl::MutexLock lock(&mutex_);
  std::vector<int64_t> numel;
  for (FlatParameter* flat : flats) {
    Entry& entry = entries_[flat];
    entry.index = static_cast<int>(numel.size());
    entry.reshard_after_forward = options_.reshard_after_forward;
    numel.push_back(NumelOf(flat));
  }
  flats_ = std::move(flats);
  history_ = std::make_unique<TouchHistory>(std::move(numel));
}

void Schedule::Touch(FlatParameter* flat) {
  const Phase phase = CurrentPhase();
  const Mark mark = MarkOf(flat, phase);
  if (free_after_use() || newest_.load(std::memory_order_relaxed) == mark) {
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  FlatParameter* const previous = UnitOf(newest_.exchange(mark));
  const bool expected =
      history_->Append(entry.index, phase == Phase::kBackward);
  entry.stays = !entry.reshard_after_forward && phase == Phase::kForward;
  const std::vector<FlatParameter*> wanted = Wanted(flat);
  // Off the record, what was kept or gathered for another path goes, too.
  const std::vector<FlatParameter*> leavers =
      expected ? std::vector<FlatParameter*>{previous} : whole_;
  for (FlatParameter* leaver : leavers) {
    if (leaver == nullptr || Contains(wanted, leaver)) continue;
    if (!Keeps(leaver, flat)) Free(leaver);
  }
  MarkTouched(flat);
  const bool chosen = entry.prefetch[static_cast<size_t>(phase)] != nullptr;
  for (FlatParameter* next : wanted) {
    if (chosen && next != flat) entries_[next].stays = true;
    if (next->whole()) continue;
    if (!MakeRoom(next, wanted) && next != flat) return;
    next->StartGather();
    MarkTouched(next);
  }
}

void Schedule::Free(FlatParameter* flat) {
  flat->FreeWhenUnpinned();
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
}

void Schedule::MarkTouched(FlatParameter* flat) {
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
  whole_.push_back(flat);
}

// Whether `unit` stays whole now that `current` is used.
bool Schedule::Keeps(FlatParameter* flat, FlatParameter* current) {
  const Entry& entry = entries_[flat];
  if (entry.stays) return true;
  if (!history_->KnowsNext()) {
    return live() <= std::min(options_.max_live, options_.max_reuse_distance);
  }
  return history_->ReusedWithin(
      entry.index, options_.max_reuse_distance - NumelOf(current) - 1);
}

// Frees others than those that are wanted; false if that is not enough.
bool Schedule::MakeRoom(FlatParameter* flat,
                        const std::vector<FlatParameter*>& wanted) {
  const int64_t limit = options_.max_live - NumelOf(flat);
  for (auto it = whole_.begin(); live() > limit && it != whole_.end();) {
    const bool gone = !Contains(wanted, *it) && (*it)->TryFree();
    it = gone ? whole_.erase(it) : it + 1;
  }
  return live() <= limit;
}

// `current`, and what is to be gathered ahead meanwhile, in this order.
std::vector<FlatParameter*> Schedule::Wanted(FlatParameter* current) {
  std::vector<FlatParameter*> wanted = {current};
  if (!options_.overlap) return wanted;
  int64_t numel = NumelOf(current);
  const auto add = [&](FlatParameter* flat)
                       ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                         // A list may name units that are never freed, or were
                         // forgotten.
                         if (Contains(wanted, flat) || !entries_.contains(flat))
                           return true;
                         numel += NumelOf(flat);
                         if (numel > options_.max_live) return false;
                         wanted.push_back(flat);
                         return true;
                       };
  const auto phase = static_cast<size_t>(CurrentPhase());
  if (const auto& chosen = entries_[current].prefetch[phase]) {
    for (FlatParameter* flat : *chosen) {
      if (!add(flat)) break;
    }
    return wanted;
  }
  const int64_t enough = numel + options_.prefetch;
  for (size_t k = 0; k < kLookAhead && numel < enough; ++k) {
    const int index = history_->Expected(k);
    FlatParameter* const flat =
        index < 0 ? nullptr : flats_[static_cast<size_t>(index)];
    if (flat == nullptr || !add(flat)) break;
  }
  return wanted;
}

void Schedule::Forget(FlatParameter* flat) {
  absl::MutexLock lock(&mutex_);
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
  std::replace(flats_.begin(), flats_.end(), flat,
               static_cast<FlatParameter*>(nullptr));
  entries_.erase(flat);
  newest_ = kNone;
}

void Schedule::EndPass() {
  absl::MutexLock lock(&mutex_);
  newest_ = kNone;
  if (history_ != nullptr) history_->Append(TouchHistory::kBorder);
  std::vector<FlatParameter*> flats;
  flats.swap(whole_);
  for (FlatParameter* flat : flats) flat->FreeWhenUnpinned();
  for (auto& [flat, entry] : entries_) {
    entry.stays = false;
    flat->DropSecondary();
  }
}

void Schedule::SetPrefetch(FlatParameter* flat, Phase phase,
                           std::vector<FlatParameter*> next) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it == entries_.end()) return;  // never freed
  it->second.prefetch[static_cast<size_t>(phase)] =
      std::make_unique<std::vector<FlatParameter*>>(std::move(next));
}

void Schedule::SetReshardAfterForward(FlatParameter* flat, bool reshard) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it != entries_.end()) it->second.reshard_after_forward = reshard;
}

}  // namespace tessera
