#include "sharding/schedule.h"

#include <algorithm>
#include <utility>

#include "sharding/unit.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

// How far ahead the record is looked at, in touches.
constexpr size_t kLookAhead = 32;

Phase CurrentPhase() {
  return torch::autograd::get_current_graph_task_id() == -1 ? Phase::kForward
                                                            : Phase::kBackward;
}

int64_t NumelOf(const Unit* unit) { return unit->layout().whole_numel(); }

bool Contains(const std::vector<Unit*>& units, const Unit* unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

Schedule::Mark Schedule::MarkOf(Unit* unit, Phase phase) {
  return reinterpret_cast<Mark>(unit) | static_cast<Mark>(phase);
}

Unit* Schedule::UnitOf(Mark mark) {
  return reinterpret_cast<Unit*>(mark & ~static_cast<Mark>(1));
}

void Schedule::Start(std::vector<Unit*> units) {
  absl::MutexLock lock(&mutex_);
  std::vector<int64_t> numel;
  for (Unit* unit : units) {
    Entry& entry = entries_[unit];
    entry.index = static_cast<int>(numel.size());
    entry.reshard_after_forward = options_.reshard_after_forward;
    numel.push_back(NumelOf(unit));
  }
  units_ = std::move(units);
  history_ = std::make_unique<TouchHistory>(std::move(numel));
}

void Schedule::Touch(Unit* unit) {
  const Phase phase = CurrentPhase();
  const Mark mark = MarkOf(unit, phase);
  if (free_after_use() || newest_.load(std::memory_order_relaxed) == mark) {
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(unit);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  Unit* const previous = UnitOf(newest_.exchange(mark));
  const bool expected =
      history_->Append(entry.index, phase == Phase::kBackward);
  entry.stays = !entry.reshard_after_forward && phase == Phase::kForward;
  const std::vector<Unit*> wanted = Wanted(unit);
  // Off the record, what was kept or gathered for another path goes, too.
  const std::vector<Unit*> leavers =
      expected ? std::vector<Unit*>{previous} : whole_;
  for (Unit* leaver : leavers) {
    if (leaver == nullptr || Contains(wanted, leaver)) continue;
    if (!Keeps(leaver, unit)) Free(leaver);
  }
  MarkTouched(unit);
  const bool chosen = entry.prefetch[static_cast<size_t>(phase)] != nullptr;
  for (Unit* next : wanted) {
    if (chosen && next != unit) entries_[next].stays = true;
    if (next->whole()) continue;
    if (!MakeRoom(next, wanted) && next != unit) return;
    next->StartGather();
    MarkTouched(next);
  }
}

void Schedule::Free(Unit* unit) {
  unit->FreeWhenUnpinned();
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
}

void Schedule::MarkTouched(Unit* unit) {
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
  whole_.push_back(unit);
}

// Whether `unit` stays whole now that `current` is used.
bool Schedule::Keeps(Unit* unit, Unit* current) {
  const Entry& entry = entries_[unit];
  if (entry.stays) return true;
  if (!history_->KnowsNext()) {
    return live() <= std::min(options_.max_live, options_.max_reuse_distance);
  }
  return history_->ReusedWithin(
      entry.index, options_.max_reuse_distance - NumelOf(current) - 1);
}

// Frees others than those that are wanted; false if that is not enough.
bool Schedule::MakeRoom(Unit* unit, const std::vector<Unit*>& wanted) {
  const int64_t limit = options_.max_live - NumelOf(unit);
  for (auto it = whole_.begin(); live() > limit && it != whole_.end();) {
    const bool gone = !Contains(wanted, *it) && (*it)->TryFree();
    it = gone ? whole_.erase(it) : it + 1;
  }
  return live() <= limit;
}

// `current`, and what is to be gathered ahead meanwhile, in this order.
std::vector<Unit*> Schedule::Wanted(Unit* current) {
  std::vector<Unit*> wanted = {current};
  if (!options_.overlap) return wanted;
  int64_t numel = NumelOf(current);
  const auto add = [&](Unit* unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // A list may name units that are never freed, or were forgotten.
    if (Contains(wanted, unit) || !entries_.contains(unit)) return true;
    numel += NumelOf(unit);
    if (numel > options_.max_live) return false;
    wanted.push_back(unit);
    return true;
  };
  const auto phase = static_cast<size_t>(CurrentPhase());
  if (const auto& chosen = entries_[current].prefetch[phase]) {
    for (Unit* unit : *chosen) {
      if (!add(unit)) break;
    }
    return wanted;
  }
  const int64_t enough = numel + options_.prefetch;
  for (size_t k = 0; k < kLookAhead && numel < enough; ++k) {
    const int index = history_->Expected(k);
    Unit* const unit = index < 0 ? nullptr : units_[static_cast<size_t>(index)];
    if (unit == nullptr || !add(unit)) break;
  }
  return wanted;
}

void Schedule::Forget(Unit* unit) {
  absl::MutexLock lock(&mutex_);
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
  std::replace(units_.begin(), units_.end(), unit, static_cast<Unit*>(nullptr));
  entries_.erase(unit);
  newest_ = kNone;
}

void Schedule::Border() {
  absl::MutexLock lock(&mutex_);
  newest_ = kNone;
  if (history_ != nullptr) history_->Append(TouchHistory::kBorder);
  std::vector<Unit*> units;
  units.swap(whole_);
  for (Unit* unit : units) unit->FreeWhenUnpinned();
  for (auto& [unit, entry] : entries_) {
    entry.stays = false;
    unit->DropSecondary();
  }
}

void Schedule::SetPrefetch(Unit* unit, Phase phase, std::vector<Unit*> next) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(unit);
  if (it == entries_.end()) return;  // never freed
  it->second.prefetch[static_cast<size_t>(phase)] =
      std::make_unique<std::vector<Unit*>>(std::move(next));
}

void Schedule::SetReshardAfterForward(Unit* unit, bool reshard) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(unit);
  if (it != entries_.end()) it->second.reshard_after_forward = reshard;
}

}  // namespace tessera
