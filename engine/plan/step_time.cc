#include "engine/plan/step_time.h"

#include <algorithm>

#include "engine/plan/absences.h"

namespace tessera {
namespace {

double SecondsOf(const TraceEvent& event, const Rates& rates, bool half) {
  if (event.kind != TraceEvent::Kind::kOperator) return 0;
  const double products =
      static_cast<double>(event.flops) /
      (half ? rates.half_flops_per_second : rates.flops_per_second);
  const double moves =
      static_cast<double>(event.moved_bytes) / rates.bytes_per_second;
  return std::max(products, moves) + rates.seconds_per_operator;
}

double Collectives(int64_t count, int64_t bytes, const RateLine& line) {
  return static_cast<double>(count) * line.seconds +
         static_cast<double>(bytes) * line.seconds_per_byte;
}

// By allocation, its event.
std::vector<int64_t> MadeOf(const Trace& trace) {
  std::vector<int64_t> made(trace.allocations.size(), -1);
  for (size_t i = 0; i < trace.events.size(); ++i) {
    if (trace.events[i].kind != TraceEvent::Kind::kAllocate) continue;
    made[static_cast<size_t>(trace.events[i].what)] = static_cast<int64_t>(i);
  }
  return made;
}

}  // namespace

double ComputeSeconds(const Trace& trace, const Rates& rates, bool half) {
  double seconds = 0;
  for (const TraceEvent& event : trace.events) {
    seconds += SecondsOf(event, rates, half);
  }
  return seconds;
}

// Of a region what comes before the last of its tensors that are needed again
// runs again, and all that it runs is recorded.
double RecomputeSeconds(const Trace& trace, const std::vector<int>& unit_of,
                        const Region::Keeps& keeps, const Rates& rates,
                        bool half) {
  if (unit_of.empty()) return 0;
  std::vector<bool> again(trace.backward, false);
  const std::vector<int64_t> made = MadeOf(trace);
  const auto unit_at = [&](size_t event) {
    const int32_t parameter = trace.events[event].unit;
    return parameter < 0 ? -1 : unit_of[static_cast<size_t>(parameter)];
  };
  for (const Absence& absence : RecomputedAbsences(trace, unit_of)) {
    if (absence.until < 0) continue;
    const auto last =
        static_cast<size_t>(made[static_cast<size_t>(absence.allocation)]);
    // Its operator's event follows.
    size_t i = last;
    while (trace.events[i].kind != TraceEvent::Kind::kOperator) ++i;
    const int unit = unit_at(last);
    for (;; --i) {
      if (again[i] || unit_at(i) != unit) break;
      again[i] = true;
      if (i == 0) break;
    }
  }
  double seconds = 0;
  for (size_t i = 0; i < trace.backward; ++i) {
    const TraceEvent& event = trace.events[i];
    if (unit_at(i) < 0 || event.kind != TraceEvent::Kind::kOperator) continue;
    seconds += rates.seconds_per_operator;
    const std::string& op = trace.operators[static_cast<size_t>(event.what)];
    if (again[i] && !(keeps && keeps(op))) {
      seconds += SecondsOf(event, rates, half);
    }
  }
  return seconds;
}

double CommunicationSeconds(const StepTraffic& traffic, double compute_seconds,
                            const Rates& rates) {
  const double during =
      Collectives(traffic.gathers, traffic.gathered_bytes, rates.all_gather) +
      Collectives(
          traffic.reductions, traffic.reduced_bytes,
          traffic.all_reduces ? rates.all_reduce : rates.reduce_scatter);
  const double after = Collectives(traffic.publications,
                                   traffic.published_bytes, rates.all_gather);
  if (!traffic.overlaps) return during + after;
  return std::max(during * rates.exposed, during - compute_seconds) + after;
}

}  // namespace tessera
