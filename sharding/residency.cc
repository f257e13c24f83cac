#include "sharding/residency.h"

#include <algorithm>

#include "sharding/unit.h"

namespace tessera {

void Residency::WillUse(Unit* unit) {
  if (!unit->stage().sharded_parameters || free_after_use()) return;
  if (newest_.load(std::memory_order_relaxed) == unit) return;
  std::vector<Unit*> victims;
  {
    absl::MutexLock lock(&mutex_);
    touched_.erase(std::remove(touched_.begin(), touched_.end(), unit),
                   touched_.end());
    touched_.push_back(unit);
    newest_.store(unit, std::memory_order_relaxed);
    while (static_cast<int>(touched_.size()) > live_units_) {
      victims.push_back(touched_.front());
      touched_.erase(touched_.begin());
    }
  }
  FreeOrKeep(victims);
}

void Residency::FreeOrKeep(const std::vector<Unit*>& victims) {
  // Outside the lock: a victim's own lock is held while it is gathered.
  std::vector<Unit*> pinned;
  for (Unit* victim : victims) {
    if (!victim->TryFree()) pinned.push_back(victim);
  }
  if (pinned.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (Unit* unit : pinned) {
    if (std::find(touched_.begin(), touched_.end(), unit) == touched_.end()) {
      touched_.insert(touched_.begin(), unit);
    }
  }
}

void Residency::Forget(Unit* unit) {
  absl::MutexLock lock(&mutex_);
  touched_.erase(std::remove(touched_.begin(), touched_.end(), unit),
                 touched_.end());
  newest_.store(nullptr, std::memory_order_relaxed);
}

void Residency::FreeAll() {
  std::vector<Unit*> units;
  {
    absl::MutexLock lock(&mutex_);
    units.swap(touched_);
    newest_.store(nullptr, std::memory_order_relaxed);
  }
  FreeOrKeep(units);
}

}  // namespace tessera
