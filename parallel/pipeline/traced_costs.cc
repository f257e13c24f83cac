#include "parallel/pipeline/traced_costs.h"

#include <algorithm>
#include <numeric>

#include "ATen/core/Tensor.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/trace_log.h"

namespace tessera {
namespace {

// Returns the trace's parameters as numbers, in the order of first use.
std::vector<size_t> InOrderOfUse(const Trace& trace) {
  const size_t never = trace.events.size();
  std::vector<size_t> first(trace.parameters.size(), never);
  for (size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& event = trace.events[i];
    if (event.kind != TraceEvent::Kind::kTouch &&
        event.kind != TraceEvent::Kind::kBegin) {
      continue;
    }
    size_t& use = first[static_cast<size_t>(event.what)];
    use = std::min(use, i);
  }
  std::vector<size_t> order(first.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return first[a] < first[b]; });
  return order;
}

}  // namespace

std::vector<PipelineParameter> CostsOf(const Trace& trace,
                                       const TracedCostOptions& options) {
  const std::vector<size_t> order = InOrderOfUse(trace);
  std::vector<PipelineParameter> parameters;
  if (order.empty()) return parameters;
  std::vector<double> costs(order.size(), 0);
  for (const TraceEvent& event : trace.events) {
    if (event.kind != TraceEvent::Kind::kOperator) continue;
    const size_t parameter =
        event.unit < 0 ? order[0] : static_cast<size_t>(event.unit);
    costs[parameter] += std::max(
        static_cast<double>(event.flops) / options.flops_per_second,
        static_cast<double>(event.moved_bytes) / options.bytes_per_second);
  }
  for (const size_t i : order) {
    const TracedParameter& each = trace.parameters[i];
    parameters.push_back({.name = each.name,
                          .unit = options.unit(each.name),
                          .numel = each.tensor->numel(),
                          .cost = costs[i]});
  }
  return parameters;
}

}  // namespace tessera
