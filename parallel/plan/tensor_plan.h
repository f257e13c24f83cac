// Tensor plans: which parameters of an unmodified module are divided among the
// ranks of a tensor-parallel group, and along which dimension
// (parallel/tensor/placed.h divides them).
//
//   TensorPlanOf       as patterns of names say
//   FindTensorPlan     found: the module's forward and backward run on tensors
//                      without memory, divided in one way after another
//   MeasureTensorPlan  what a plan costs
//
// Nothing communicates here. The module is left as it was, also after errors:
// values, gradients, requires_grad, the state of the default generator. No
// memory of its size is taken.
#ifndef PARALLEL_PLAN_TENSOR_PLAN_H_
#define PARALLEL_PLAN_TENSOR_PLAN_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sharding/trace/trace.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct PlannedPart {
  std::string name;    // the parameter's first in named_parameters()
  int64_t dim = 0;     // it is S(dim): each rank has a slice along it
  int64_t groups = 1;  // it is S(dim, groups), if there are several
};

struct TensorPlan {
  int ranks = 1;
  // In the order of named_parameters(). What is not listed stays whole.
  std::vector<PlannedPart> parts;
  // Elements that a rank holds of parameters that are divided, and of those
  // that are whole.
  int64_t part_numel = 0;
  int64_t whole_numel = 0;

  // ---- one micro-batch's forward and backward on one rank; all 0 and empty if
  // the plan was not measured ----

  // Sums over the ranks, and gathers of parts.
  int64_t collectives = 0;
  // Bytes of the tensors that these sum, and of the wholes that they gather.
  int64_t bytes = 0;
  // Multiplications and additions of products (TraceEvent::flops).
  int64_t flops = 0;
  // Operators that have no rule for the parts that they get, so these are
  // gathered: "[blocks.*.attention] aten::view", each once.
  std::vector<std::string> gathered;
  // Estimated time by TensorPlanOptions, of a micro-batch and of an update of
  // what the rank holds; and that with nothing divided.
  double seconds = 0;
  double whole_seconds = 0;

  // Returns a table for people, in which repeated blocks stand once.
  std::string ToString() const;
};

// What divides the parameters that match a pattern.
struct PartPattern {
  // Matches names of parameters ("layers.*.q.weight") or of the modules that
  // have them ("layers.*.q"): '*' stands for any characters, '?' for one.
  std::string pattern;
  //   "0", "1", ...  S(0), S(1): in each parameter that has the dimension, if
  //                  the pattern is a module's
  //   "colwise"      S(0): a Linear's outputs, with its bias
  //   "colwise_qkv", "colwise_gate_up"
  //                  S(0, 3), S(0, 2): the same where its outputs are [q | k |
  //                  v], or [gate | up], of equal sizes
  //   "rowwise"      S(1): a Linear's inputs; its bias stays whole
  //   "vocabulary"   S(0): the rows of a table, or of a head
  //   "whole"        not divided; for exceptions, which come first
  std::string how;
};

// Returns the plan of these patterns; the first one that matches a parameter
// counts. InvalidArgument names a pattern that matches nothing and the most
// similar names, or a parameter that `ranks` ranks cannot divide so, or that
// cannot be divided at all. LOCAL.
absl::StatusOr<TensorPlan> TensorPlanOf(
    const torch::nn::Module& module, const std::vector<PartPattern>& patterns,
    int ranks);

// The speed of a rank while all ranks work, from which times are computed.
// engine/plan/rates.h measures it; the defaults are some accelerator's in a
// host with fast links, in float32.
struct TensorPlanOptions {
  double flops_per_second = 1e14;           // of products
  double memory_bytes_per_second = 1.5e12;  // that operators read and write
  // Bytes that a rank sends. A sum of B bytes over t ranks sends 2 * B *
  // (t - 1) / t, a gather half of that.
  double link_bytes_per_second = 1e11;
  double seconds_per_collective = 2e-5;
  // The cost of each element that a rank holds, so that parameters are divided
  // where that costs nothing else: bytes that its update reads and writes (28
  // for Adam in float32), and bytes that the rank sends to sum its gradient
  // over the ranks that have the same part (8 in float32; 0 if there are none).
  // For a step of N micro-batches, a Nth of these.
  double update_bytes_per_element = 28;
  double reduced_bytes_per_element = 8;
  // Ways of dividing the module that a search tries at most.
  int most_runs = 400;
  TraceOptions trace;
};

// Finds the plan that takes the least time. `loss` as in TakeTrace
// (sharding/trace/trace.h); it is called some dozens of times. Repeated blocks
// are divided in the same way. Parameters that share memory, or that are not
// dense floating-point leaves, stay whole. LOCAL; a second for a transformer of
// 24 layers.
//
// Errors are those of TakeTrace, if it cannot run the module as it is.
absl::StatusOr<TensorPlan> FindTensorPlan(
    const torch::nn::Module& module, const std::function<at::Tensor()>& loss,
    int ranks, const TensorPlanOptions& options = {});

// Sets what `plan` says of a micro-batch. Errors are those of TakeTrace, and of
// parallel/tensor. LOCAL.
absl::Status MeasureTensorPlan(const torch::nn::Module& module,
                               const std::function<at::Tensor()>& loss,
                               const TensorPlanOptions& options,
                               TensorPlan* plan);

}  // namespace tessera
#endif  // PARALLEL_PLAN_TENSOR_PLAN_H_
