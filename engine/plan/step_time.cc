#include "engine/plan/step_time.h"

#include <algorithm>

#include "engine/plan/replay/recomputation.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/trace_log.h"

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

}  // namespace

double ComputeSeconds(const Trace& trace, const Rates& rates, bool half) {
  double seconds = 0;
  for (const TraceEvent& event : trace.events) {
    seconds += SecondsOf(event, rates, half);
  }
  return seconds;
}

double RecomputeSeconds(const Recomputation& recomputation, const Rates& rates,
                        bool half) {
  double seconds =
      static_cast<double>(recomputation.recorded) * rates.seconds_per_operator;
  for (const Rerun& rerun : recomputation.reruns) {
    for (const TraceEvent& step : rerun.steps) {
      seconds += SecondsOf(step, rates, half);
    }
  }
  return seconds;
}

double CommunicationSeconds(const StepTraffic& traffic, double compute_seconds,
                            const Rates& rates) {
  const double gathers =
      Collectives(traffic.gathers, traffic.gathered_bytes, rates.gather);
  const double sums = Collectives(traffic.reductions, traffic.reduced_bytes,
                                  traffic.all_reduces ? rates.all_reduce
                                                      : rates.reduce_scatter) +
                      Collectives(traffic.replica_sums, traffic.replica_bytes,
                                  rates.all_reduce);
  const double after = Collectives(traffic.publications,
                                   traffic.published_bytes, rates.all_gather);
  if (!traffic.overlaps) return gathers + sums + after;
  return std::max(gathers * rates.gather_exposed + sums * rates.exposed,
                  gathers + sums - compute_seconds) +
         after;
}

double OffloadSeconds(const OffloadTraffic& traffic, double seconds,
                      const Rates& rates) {
  if (rates.disk_read_per_second <= 0) return 0;
  const double transfer =
      static_cast<double>(traffic.read) / rates.disk_read_per_second +
      static_cast<double>(traffic.written) / rates.disk_written_per_second;
  return std::max(0.0, transfer - seconds);
}

}  // namespace tessera
