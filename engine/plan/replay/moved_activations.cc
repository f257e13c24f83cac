// As offload/activation_store.h, of the regions of a trace: where it says
// kUnderWay, so many are still here; where it says that a group comes back with
// the first that is asked for, and the group before it, they do.
#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "engine/plan/replay/recomputer.h"
#include "offload/activation_store.h"

namespace tessera {

bool Recomputer::Moves(int32_t allocation) const {
  const TracedLife& moved = life(allocation);
  return options_.moves_from >= 0 && moved.forward && !moved.cast &&
         moved.bytes >= options_.moves_from;
}

// As Region::SavedBytes.
int64_t Recomputer::SavedBytes(const TracedRegion& region) const {
  int64_t bytes = 0;
  for (const auto& [allocation, asked] : region.saved) {
    if (life(allocation).forward) bytes += life(allocation).bytes;
  }
  return bytes;
}

// As RecomputedUnits' Module::GiveUp and Module::Move.
void Recomputer::Move(const std::set<int32_t>& held_by_tape,
                      TracedRegion* region) {
  if (options_.moves_from < 0) return;
  if (!options_.recomputes) {
    const int64_t bytes = SavedBytes(*region);
    if (kept_bytes_ + bytes <= options_.budget_bytes) {
      kept_bytes_ += bytes;
      return;
    }
  }
  const std::set<int32_t> given_up(region->given_up.begin(),
                                   region->given_up.end());
  for (const auto& [allocation, asked] : region->saved) {
    if (!Moves(allocation) || given_up.count(allocation) > 0) continue;
    region->moved.push_back(allocation);
  }
  for (const int32_t allocation : held_by_tape) {
    if (!Moves(allocation) || region->saved.count(allocation) > 0) continue;
    region->moved_of_tape.push_back(allocation);
  }
}

// What a region asks for that leaves it where it is.
void Recomputer::FindStaying() {
  for (const TracedRegion& region : regions_) {
    std::set<int32_t> gone(region.given_up.begin(), region.given_up.end());
    gone.insert(region.moved.begin(), region.moved.end());
    for (const auto& [allocation, asked] : region.saved) {
      if (gone.count(allocation) == 0) life(allocation).stays = true;
    }
  }
}

// By allocation, the event before which it has left; end_: it never does.
std::map<int32_t, int64_t> Recomputer::FindLeft() const {
  std::map<int32_t, int64_t> left;
  std::vector<int32_t> leaving;
  for (const TracedRegion& region : regions_) {
    for (const auto* const moved : {&region.moved, &region.moved_of_tape}) {
      leaving.insert(leaving.end(), moved->begin(), moved->end());
    }
    while (leaving.size() > ActivationStore::kUnderWay) {
      int64_t& when = left[leaving.front()];
      when = std::max(when, region.end);
      leaving.erase(leaving.begin());
    }
  }
  for (const int32_t allocation : leaving) left[allocation] = end_;
  return left;
}

// By region, the event before which what it has moved comes back.
std::vector<int64_t> Recomputer::FindWanted() const {
  std::vector<int64_t> wanted(regions_.size(), end_);
  int64_t behind = end_;  // of the one that comes next in forward
  for (size_t r = regions_.size(); r-- > 0;) {
    const TracedRegion& region = regions_[r];
    if (region.moved.empty() && region.moved_of_tape.empty()) continue;
    int64_t own = region.restored < 0 ? end_ : region.restored;
    for (const int32_t allocation : region.moved) {
      own = std::min(own, region.saved.at(allocation));
    }
    wanted[r] = std::min(own, behind);
    behind = own;
  }
  return wanted;
}

void Recomputer::AddMoved(Recomputation* made) {
  FindStaying();
  const std::map<int32_t, int64_t> left = FindLeft();
  const std::vector<int64_t> wanted = FindWanted();
  std::map<int32_t, int64_t> back;  // by allocation, the first time
  std::vector<Rerun> for_tapes;
  for (size_t r = 0; r < regions_.size(); ++r) {
    const TracedRegion& region = regions_[r];
    for (const int32_t allocation : region.moved) {
      made->moved_bytes += life(allocation).bytes;
      int64_t& first = back.try_emplace(allocation, end_).first->second;
      first = std::min(first, wanted[r]);
    }
    for (const int32_t allocation : region.moved_of_tape) {
      made->moved_bytes += life(allocation).bytes;
      TracedLife& held = life(allocation);
      const bool leaves = left.at(allocation) < end_;
      held.held_until = std::max(
          held.held_until, leaves ? left.at(allocation) : region.last_node);
      if (!leaves || region.restored < 0) continue;
      const auto again = std::find_if(
          made->reruns.begin(), made->reruns.end(),
          [&](const Rerun& rerun) { return rerun.event == region.restored; });
      const TraceEvent back_again{
          TraceEvent::Kind::kAllocate, true, -1, -1, -1, held.bytes};
      again->steps.push_back(back_again);
      again->steps.back().kind = TraceEvent::Kind::kFree;
      for_tapes.push_back({wanted[r], {}, {back_again}});
    }
  }
  made->reruns.insert(made->reruns.begin(), for_tapes.begin(), for_tapes.end());
  for (const auto& [allocation, until] : back) {
    const TracedLife& moved = life(allocation);
    if (moved.stays) continue;
    const int64_t used = moved.last_forward_use < 0
                             ? 0
                             : EndOfOperator(moved.last_forward_use) + 1;
    const int64_t from = std::max(used, left.at(allocation));
    if (from < until) made->absences.push_back({allocation, from, until, -1});
  }
}

}  // namespace tessera
