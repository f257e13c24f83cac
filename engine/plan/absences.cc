#include "engine/plan/absences.h"

#include <utility>

namespace tessera {
namespace {

// A run of forward events on behalf of one unit: what is computed again.
struct Region {
  int unit = -1;
  int64_t end = 0;        // the first event after it
  int64_t restored = -1;  // event before which it is computed again
};

// In order; `region_of`: by event of the forward, -1: it is of none.
std::vector<Region> RegionsOf(const Trace& trace,
                              const std::vector<int>& unit_of,
                              std::vector<int>* region_of) {
  std::vector<Region> regions;
  int before = -1;
  for (size_t i = 0; i < trace.backward; ++i) {
    const int32_t parameter = trace.events[i].unit;
    const int unit =
        parameter < 0 ? -1 : unit_of[static_cast<size_t>(parameter)];
    if (unit >= 0 && unit != before) regions.push_back({unit});
    if (unit >= 0) regions.back().end = static_cast<int64_t>(i) + 1;
    region_of->push_back(unit < 0 ? -1 : static_cast<int>(regions.size()) - 1);
    before = unit;
  }
  return regions;
}

// By allocation, the event that frees it; the end if none does.
std::vector<int64_t> FreedOf(const Trace& trace) {
  std::vector<int64_t> freed(trace.allocations.size(),
                             static_cast<int64_t>(trace.events.size()));
  for (size_t i = 0; i < trace.events.size(); ++i) {
    if (trace.events[i].kind != TraceEvent::Kind::kFree) continue;
    freed[static_cast<size_t>(trace.events[i].what)] = static_cast<int64_t>(i);
  }
  return freed;
}

// By allocation, its event in forward; -1: none, or it is freed there.
std::vector<int64_t> SavedOf(const Trace& trace) {
  std::vector<int64_t> saved(trace.allocations.size(), -1);
  for (size_t i = 0; i < trace.backward; ++i) {
    const TraceEvent& event = trace.events[i];
    const auto what = static_cast<size_t>(event.what);
    if (event.kind == TraceEvent::Kind::kAllocate) {
      saved[what] = static_cast<int64_t>(i);
    } else if (event.kind == TraceEvent::Kind::kFree) {
      saved[what] = -1;
    }
  }
  return saved;
}

}  // namespace

std::vector<Absence> CastAbsences(const Trace& trace,
                                  const std::vector<bool>& is_owned) {
  std::vector<Absence> absences;
  const std::vector<int64_t> saved = SavedOf(trace);
  for (size_t i = 0; i < saved.size(); ++i) {
    const TracedAllocation& allocation = trace.allocations[i];
    if (saved[i] < 0 || allocation.last_forward_use < 0) continue;
    if (allocation.cast_of < 0) continue;
    if (!is_owned[static_cast<size_t>(allocation.cast_of)]) continue;
    absences.push_back({static_cast<int32_t>(i),
                        allocation.last_forward_use + 1,
                        allocation.first_backward_use, allocation.cast_of});
  }
  return absences;
}

// Of a region that backward follows at once nothing is given up.
std::vector<Absence> RecomputedAbsences(const Trace& trace,
                                        const std::vector<int>& unit_of) {
  std::vector<int> region_of;
  std::vector<Region> regions = RegionsOf(trace, unit_of, &region_of);
  const std::vector<int64_t> saved = SavedOf(trace);
  std::vector<std::pair<size_t, Region*>> given_up;
  for (size_t i = 0; i < saved.size(); ++i) {
    const TracedAllocation& allocation = trace.allocations[i];
    if (saved[i] < 0 || allocation.cast_of >= 0) continue;
    const int number = region_of[static_cast<size_t>(saved[i])];
    if (number < 0) continue;
    Region& region = regions[static_cast<size_t>(number)];
    const int64_t last = allocation.last_forward_use;
    const bool others =
        last >= 0 && region_of[static_cast<size_t>(last)] != number;
    if (others || region.end == static_cast<int64_t>(trace.backward)) continue;
    given_up.emplace_back(i, &region);
    const int64_t first = allocation.first_backward_use;
    if (first >= 0 && (region.restored < 0 || first < region.restored)) {
      region.restored = first;
    }
  }
  const std::vector<int64_t> freed = FreedOf(trace);
  std::vector<Absence> absences;
  for (const auto& [i, region] : given_up) {
    const bool comes_back = freed[i] > region->restored;
    absences.push_back({static_cast<int32_t>(i), region->end,
                        comes_back ? region->restored : -1, -1});
  }
  return absences;
}

}  // namespace tessera
