// While a DeterministicScope lives, libtorch computes with deterministic
// algorithms, so that a program gives the same bits again on a device.
//
// The switches belong to the process. Scopes are counted and the strictest one
// counts; when the last one ends each switch goes back to its value before the
// first, unless somebody else has set it meanwhile. A switch that was stricter
// before stays so.
//
//   switch                                  while a scope lives
//   deterministicAlgorithms                 on
//     warn_only                             on, but with kErrors
//     fill_uninitialized_memory             off (a pass over each new tensor,
//                                           for programs that read them unset)
//   cuDNN: deterministic, benchmark         on, off
//
// Threads: any.
#ifndef BASE_TORCH_DETERMINISTIC_H_
#define BASE_TORCH_DETERMINISTIC_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

enum class Determinism {
  // An operator without a deterministic form runs, with one warning for each
  // operator on the thread that made the scope. libtorch's fused attention then
  // does not take its deterministic backward, and warns.
  kWarns,
  // Such an operator is an error; attention's backward is deterministic.
  kErrors,
};

class DeterministicScope {
 public:
  explicit DeterministicScope(Determinism how);
  ~DeterministicScope();
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

 private:
  class WarnsOnce;

  const Determinism how_;
  WarnsOnce* const warns_;  // of the thread that made this
};

// Makes cuBLAS sum in one order, which it does if CUBLAS_WORKSPACE_CONFIG is
// ":4096:8" or ":16:8" when it is first used. Sets the former where the
// environment has no such variable; returns FailedPrecondition if it has
// another value.
absl::Status SetDeterministicCublas();

// Returns the operators in the graph of `loss` whose backward adds up in any
// order on a device while Determinism::kWarns holds, each once, such as
// "aten::_scaled_dot_product_cudnn_attention". libtorch says so of some of them
// only. The graph may have been run; what backward runs by itself (nested
// graphs) is not in it.
std::vector<std::string> UnorderedBackwards(const at::Tensor& loss);

}  // namespace tessera
#endif  // BASE_TORCH_DETERMINISTIC_H_
