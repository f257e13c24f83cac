#include "engine/plan/replay/absences.h"

namespace tessera {
namespace {

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

}  // namespace tessera
