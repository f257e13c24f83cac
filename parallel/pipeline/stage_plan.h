// Stage plans: which stage of a pipeline each parameter of a module is in.
//
//   in the order of use   token | block0 .. | block1 .. | block2 .. | norm head
//   cost                    1        8           8           8           4
//   2 stages              `------------ 0 ------------'   `-------- 1 --------'
//
// Stages are consecutive parameters. They begin where a unit begins (a block,
// as a rule): between two units little is exchanged.
//
// Threads: any.
#ifndef PARALLEL_PIPELINE_STAGE_PLAN_H_
#define PARALLEL_PIPELINE_STAGE_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

struct PipelineParameter {
  std::string name;
  // Consecutive parameters of the same unit stay together. A unit that comes
  // twice, with others in between, counts as two.
  std::string unit;
  int64_t numel = 0;
  double cost = 0;  // seconds of a micro-batch, say; 0: not known, or none
};

// What is divided equally among the stages (pipeline.partition).
enum class PipelinePartition {
  kBest,        // costs; elements, if no parameter has a cost
  kParameters,  // elements
  kUniform,     // the number of units
};

struct PipelinePlan {
  std::vector<int> stage;     // by parameter, never decreasing
  std::vector<double> share;  // by stage, of what is divided; sums to 1
  std::string reason;         // for a log: what is divided, where stages begin
};

// Returns the plan in which the stage that takes longest takes the least. If
// there are `split_points` (pipeline.split_points), a stage begins at the first
// parameter of each instead: a parameter's name, or that of a module around
// some. `parameters`: in the order in which the forward uses them. The same
// arguments give the same plan. LOCAL.
//
// InvalidArgument: fewer units than stages; split points that are not one fewer
// than the stages, that name nothing (with the nearest name), that are out of
// order, or of which two are the same or one is the first parameter.
absl::StatusOr<PipelinePlan> PlanStages(
    const std::vector<PipelineParameter>& parameters, int stages,
    PipelinePartition partition, const std::vector<std::string>& split_points);

// Returns the name of the repeated layer that has the parameter, for use as its
// unit: up to the first component that is a number ("layers.3" for
// "layers.3.mlp.up.weight"), else the first that ends in one ("block3" for
// "block3.up.weight"), else the module's ("head" for "head.weight", "" for
// "scale").
std::string LayerOf(absl::string_view parameter);

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_STAGE_PLAN_H_
