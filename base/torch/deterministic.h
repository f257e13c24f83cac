// DeterministicScope: while one lives libtorch computes with deterministic
// algorithms, so that the same program gives the same bits again on a device.
//
// The switches are the process's: scopes are counted, the strictest counts, and
// with the last one each switch goes back to what it was before the first,
// unless somebody else has set it meanwhile. What was stricter before stays so.
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

#include "absl/status/status.h"

namespace tessera {

enum class Determinism {
  // An operator without a deterministic form runs, and a warning says so, once
  // for each on the thread that made the scope. libtorch's fused attention does
  // not take its deterministic backward then, and warns.
  kWarns,
  // It is an error; attention's backward is deterministic.
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

// cuBLAS sums in one order if CUBLAS_WORKSPACE_CONFIG says ":4096:8" or
// ":16:8" when it is first used. Sets the former where the environment has no
// such variable; FailedPrecondition if it says something else.
absl::Status SetDeterministicCublas();

}  // namespace tessera
#endif  // BASE_TORCH_DETERMINISTIC_H_
