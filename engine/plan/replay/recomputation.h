// Recomputation: what a trace's forward keeps where modules are computed again
// in backward, as sharding/recompute has it, and what computing them again
// takes.
//
//   region    operators on behalf of one module; from its first parameter to
//             the first of another's
//   given up  what its operators made and its nodes saved, unless the policy
//             holds it or the budget has room for all of the region
//   held      by the region's tape until its last node has run: what it reads
//             from outside, and what the policy does not compute again
//   run again before the first node that needs what was given up: the operators
//             that lead to it, with their parameters and temporaries
//   moved     what else its nodes saved and its tape holds
//             (offload/activation_store.h): gone until a node of the region
//             behind it asks for the first of its own
#ifndef ENGINE_PLAN_REPLAY_RECOMPUTATION_H_
#define ENGINE_PLAN_REPLAY_RECOMPUTATION_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/plan/replay/absences.h"
#include "sharding/trace/trace.h"

namespace tessera {

struct RecomputationOptions {
  static constexpr int kNone = -1;
  static constexpr int kUnseen = -2;  // its use begins and ends no region
  // For each parameter of the trace, the recomputed module that it is in;
  // empty: no module is recomputed.
  std::vector<int> module_of;
  // Whether the results of an operator are held (RecomputeOptions); null: none
  // are.
  std::function<bool(absl::string_view op)> keeps;
  int64_t budget_bytes = 0;
  // Tensors that are not given up are moved until backward if they have at
  // least so many bytes; < 0: they stay.
  int64_t moves_from = -1;
  // False: nothing is given up.
  bool recomputes = true;
};

// A region that runs again.
struct Rerun {
  int64_t event = 0;  // the region runs before this event
  // Parameters that the node there uses before it asks for what was given up.
  std::vector<int32_t> used_before;
  // Events: kTouch, kOperator; kAllocate of what comes back, or, with `what`
  // -1, of temporary `bytes` that a kFree with -1 frees.
  std::vector<TraceEvent> steps;
};

struct Recomputation {
  std::vector<Absence> absences;  // those that are back are in a Rerun
  // By allocation: its kFree does not count, since an absence frees it.
  std::vector<bool> outlives;
  std::vector<Rerun> reruns;  // by event
  int64_t recorded = 0;       // operators of the forward, for these or others
  int64_t moved_bytes = 0;    // moved away, and back
};

Recomputation Recompute(const Trace& trace,
                        const RecomputationOptions& options);

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_RECOMPUTATION_H_
