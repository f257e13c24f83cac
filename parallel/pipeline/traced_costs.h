// Costs of parameters, for a stage plan: how long the operators take that run
// on their behalf, predicted from a trace.
#ifndef PARALLEL_PIPELINE_TRACED_COSTS_H_
#define PARALLEL_PIPELINE_TRACED_COSTS_H_

#include <functional>
#include <string>
#include <vector>

#include "parallel/pipeline/stage_plan.h"

namespace tessera {

struct Trace;  // sharding/trace/trace.h

// The speed of a rank; the defaults are those of one thread of a host. Only
// their quotient matters for a plan.
struct TracedCostOptions {
  double flops_per_second = 5e10;  // of products
  double bytes_per_second = 5e9;   // that operators read and write
  // The unit of a parameter, by its name.
  std::function<std::string(const std::string& parameter)> unit = LayerOf;
};

// Returns the parameters in the order in which the trace first uses them, those
// that it does not use last, with the seconds of the operators of forward and
// backward: each is charged to the parameter whose module is in use
// (TraceEvent::unit), those before the first use to the first parameter.
// REQUIRES: the trace's module lives. LOCAL.
std::vector<PipelineParameter> CostsOf(const Trace& trace,
                                       const TracedCostOptions& options = {});

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_TRACED_COSTS_H_
