#include "sharding/flat/schedule.h"

#include <algorithm>
#include <utility>

#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

// How far ahead the record is looked at, in touches.
constexpr size_t kLookAhead = 32;

Phase CurrentPhase() {
  return torch::autograd::get_current_graph_task_id() == -1 ? Phase::kForward
                                                            : Phase::kBackward;
}

bool Contains(const std::vector<Gatherable*>& flats, const Gatherable* flat) {
  return std::find(flats.begin(), flats.end(), flat) != flats.end();
}

}  // namespace

Schedule::Mark Schedule::MarkOf(Gatherable* flat, Phase phase) {
  return reinterpret_cast<Mark>(flat) | static_cast<Mark>(phase);
}

Gatherable* Schedule::FlatOf(Mark mark) {
  return reinterpret_cast<Gatherable*>(mark & ~static_cast<Mark>(1));
}

void Schedule::Start(std::vector<Gatherable*> flats) {
  absl::MutexLock lock(&mutex_);
  std::vector<int64_t> numel;
  for (Gatherable* flat : flats) {
    Entry& entry = entries_[flat];
    entry.index = static_cast<int>(numel.size());
    entry.reshard_after_forward = options_.reshard_after_forward;
    numel.push_back(flat->whole_numel());
  }
  flats_ = std::move(flats);
  history_ = std::make_unique<TouchHistory>(std::move(numel));
}

void Schedule::Touch(Gatherable* flat) { Touch(flat, CurrentPhase()); }

void Schedule::Touch(Gatherable* flat, Phase phase) {
  const Mark mark = MarkOf(flat, phase);
  if (free_after_use() || newest_.load(std::memory_order_relaxed) == mark) {
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  Gatherable* const previous = FlatOf(newest_.exchange(mark));
  const bool expected =
      history_->Append(entry.index, phase == Phase::kBackward);
  entry.stays = !entry.reshard_after_forward && phase == Phase::kForward;
  const std::vector<Gatherable*> wanted = Wanted(flat, phase);
  // Off the record, what was kept or gathered for another path goes, too.
  const std::vector<Gatherable*> leavers =
      expected ? std::vector<Gatherable*>{previous} : whole_;
  for (Gatherable* leaver : leavers) {
    if (leaver == nullptr || Contains(wanted, leaver)) continue;
    if (!Keeps(leaver, flat)) Free(leaver);
  }
  MarkTouched(flat);
  const bool chosen = entry.prefetch[static_cast<size_t>(phase)] != nullptr;
  for (Gatherable* next : wanted) {
    if (chosen && next != flat) entries_[next].stays = true;
    if (next->whole()) continue;
    if (!MakeRoom(next, wanted) && next != flat) return;
    next->StartGather(/*ahead=*/next != flat);
    MarkTouched(next);
  }
}

void Schedule::Free(Gatherable* flat) {
  flat->FreeWhenUnpinned();
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
}

void Schedule::MarkTouched(Gatherable* flat) {
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
  whole_.push_back(flat);
}

// Whether `flat` stays whole now that `current` is used.
bool Schedule::Keeps(Gatherable* flat, Gatherable* current) {
  const Entry& entry = entries_[flat];
  if (entry.stays) return true;
  if (!history_->KnowsNext()) {
    return live() <= std::min(options_.max_live, options_.max_reuse_distance);
  }
  return history_->ReusedWithin(
      entry.index, options_.max_reuse_distance - current->whole_numel() - 1);
}

// Frees others than those that are wanted; false if that is not enough.
bool Schedule::MakeRoom(Gatherable* flat,
                        const std::vector<Gatherable*>& wanted) {
  const int64_t limit = options_.max_live - flat->whole_numel();
  for (auto it = whole_.begin(); live() > limit && it != whole_.end();) {
    const bool gone = !Contains(wanted, *it) && (*it)->TryFree();
    it = gone ? whole_.erase(it) : it + 1;
  }
  return live() <= limit;
}

// `current`, and what is to be gathered ahead meanwhile, in this order.
std::vector<Gatherable*> Schedule::Wanted(Gatherable* current, Phase phase) {
  std::vector<Gatherable*> wanted = {current};
  if (!options_.overlap) return wanted;
  int64_t numel = current->whole_numel();
  const auto add = [&](Gatherable* flat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // A list may name flats that are never freed, or were
    // forgotten.
    if (Contains(wanted, flat) || !entries_.contains(flat)) return true;
    numel += flat->whole_numel();
    if (numel > options_.max_live) return false;
    wanted.push_back(flat);
    return true;
  };
  const auto index_of_phase = static_cast<size_t>(phase);
  if (const auto& chosen = entries_[current].prefetch[index_of_phase]) {
    for (Gatherable* flat : *chosen) {
      if (!add(flat)) break;
    }
    return wanted;
  }
  const int64_t enough = numel + options_.prefetch;
  for (size_t k = 0; k < kLookAhead && numel < enough; ++k) {
    const int index = history_->Expected(k);
    Gatherable* const flat =
        index < 0 ? nullptr : flats_[static_cast<size_t>(index)];
    if (flat == nullptr || !add(flat)) break;
  }
  return wanted;
}

void Schedule::Forget(Gatherable* flat) {
  absl::MutexLock lock(&mutex_);
  whole_.erase(std::remove(whole_.begin(), whole_.end(), flat), whole_.end());
  std::replace(flats_.begin(), flats_.end(), flat,
               static_cast<Gatherable*>(nullptr));
  entries_.erase(flat);
  newest_ = kNone;
}

void Schedule::EndPass() {
  absl::MutexLock lock(&mutex_);
  newest_ = kNone;
  if (history_ != nullptr) history_->Append(TouchHistory::kBorder);
  std::vector<Gatherable*> flats;
  flats.swap(whole_);
  for (Gatherable* flat : flats) flat->FreeWhenUnpinned();
  for (auto& [flat, entry] : entries_) {
    entry.stays = false;
    flat->DropSecondary();
  }
}

void Schedule::SetPrefetch(Gatherable* flat, Phase phase,
                           std::vector<Gatherable*> next) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it == entries_.end()) return;  // never freed
  it->second.prefetch[static_cast<size_t>(phase)] =
      std::make_unique<std::vector<Gatherable*>>(std::move(next));
}

void Schedule::SetReshardAfterForward(Gatherable* flat, bool reshard) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(flat);
  if (it != entries_.end()) it->second.reshard_after_forward = reshard;
}

}  // namespace tessera
