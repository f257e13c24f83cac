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

}  // namespace

void Schedule::Start(std::vector<Unit*> units) {
  absl::MutexLock lock(&mutex_);
  std::vector<int64_t> numel;
  for (Unit* unit : units) {
    Entry& entry = entries_[unit];
    entry.index = static_cast<int>(numel.size());
    entry.reshard_after_forward = options_.reshard_after_forward;
    numel.push_back(unit->layout().whole_numel());
  }
  units_ = std::move(units);
  history_ = std::make_unique<TouchHistory>(std::move(numel));
}

void Schedule::Touch(Unit* unit) {
  if (free_after_use() || newest_.load(std::memory_order_relaxed) == unit) {
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(unit);
  if (entry == entries_.end()) return;
  Unit* const previous = newest_.exchange(unit, std::memory_order_relaxed);
  const bool expected =
      history_->Append(entry->second.index, CurrentPhase() == Phase::kBackward);
  MarkTouched(unit);
  if (!expected) {
    Reconsider(unit);
  } else if (previous != nullptr) {
    FreeUnlessKept(previous);
  }
  MakeRoom(unit);
  Prefetch(unit);
}

void Schedule::MarkTouched(Unit* unit) {
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
  whole_.push_back(unit);
}

void Schedule::FreeUnlessKept(Unit* unit) {
  if (Keeps(unit)) return;
  unit->FreeWhenUnpinned();
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
}

// What was kept or gathered for another path goes.
void Schedule::Reconsider(Unit* current) {
  const std::vector<Unit*> units = whole_;
  for (Unit* unit : units) {
    if (unit != current) FreeUnlessKept(unit);
  }
}

bool Schedule::Keeps(Unit* unit) {
  const Entry& entry = entries_[unit];
  if (!entry.reshard_after_forward && CurrentPhase() == Phase::kForward) {
    return true;
  }
  if (history_->KnowsNext()) {
    return history_->ReusedWithin(entry.index, options_.max_reuse_distance);
  }
  return live() <= std::min(options_.max_live, options_.max_reuse_distance);
}

void Schedule::MakeRoom(Unit* unit) {
  const int64_t needed = unit->whole() ? 0 : unit->layout().whole_numel();
  for (auto it = whole_.begin();
       live() + needed > options_.max_live && it != whole_.end();) {
    Unit* const victim = *it;
    const bool gone = victim != unit && victim->TryFree();
    it = gone ? whole_.erase(it) : it + 1;
  }
}

void Schedule::GatherAhead(Unit* unit) {
  if (unit->whole()) return;
  unit->StartGather();
  MarkTouched(unit);
}

void Schedule::Prefetch(Unit* current) {
  if (!options_.overlap) return;
  const auto phase = static_cast<size_t>(CurrentPhase());
  if (const auto& chosen = entries_[current].prefetch[phase]) {
    for (Unit* unit : *chosen) GatherAhead(unit);
    return;
  }
  int64_t ahead = 0;
  for (size_t k = 0; k < kLookAhead && ahead < options_.prefetch; ++k) {
    const int index = history_->Expected(k);
    if (index < 0) return;
    Unit* const unit = units_[static_cast<size_t>(index)];
    if (unit == nullptr) return;
    if (unit == current) continue;
    const int64_t numel = unit->layout().whole_numel();
    ahead += numel;
    if (!unit->whole() && live() + numel > options_.max_live) return;
    GatherAhead(unit);
  }
}

void Schedule::Forget(Unit* unit) {
  absl::MutexLock lock(&mutex_);
  whole_.erase(std::remove(whole_.begin(), whole_.end(), unit), whole_.end());
  std::replace(units_.begin(), units_.end(), unit, static_cast<Unit*>(nullptr));
  entries_.erase(unit);
  newest_ = nullptr;
}

void Schedule::Border() {
  absl::MutexLock lock(&mutex_);
  newest_ = nullptr;
  if (history_ != nullptr) history_->Append(TouchHistory::kBorder);
  std::vector<Unit*> units;
  units.swap(whole_);
  for (Unit* unit : units) unit->FreeWhenUnpinned();
  for (Unit* unit : units_) {
    if (unit != nullptr) unit->DropSecondary();
  }
}

void Schedule::SetPrefetch(Unit* unit, Phase phase, std::vector<Unit*> next) {
  absl::MutexLock lock(&mutex_);
  entries_[unit].prefetch[static_cast<size_t>(phase)] =
      std::make_unique<std::vector<Unit*>>(std::move(next));
}

void Schedule::SetReshardAfterForward(Unit* unit, bool reshard) {
  absl::MutexLock lock(&mutex_);
  entries_[unit].reshard_after_forward = reshard;
}

}  // namespace tessera
