// What to change in a configuration so that a plan fits.
#ifndef ENGINE_PLAN_PLAN_CHANGES_H_
#define ENGINE_PLAN_PLAN_CHANGES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/plan.h"

namespace tessera {

struct PlanChange {
  std::string what;        // keys, and what to set them to
  int64_t peak_bytes = 0;  // planned with it
};

// Returns at most `most` changes, each of which would keep a run at `stage`
// within the plan's memory_bytes, cheapest in time first: stages up to 2 send
// no more than stage 0, a smaller micro-batch makes smaller products, stage 3
// sends half as much again, recomputing activations takes a third of the time
// of their forward and backward. Half a micro-batch is counted with half of the
// activations. Empty: no change, and no two of them, are enough.
std::vector<PlanChange> CheapestThatFit(const PlanReport& report, int stage,
                                        size_t most);

}  // namespace tessera
#endif  // ENGINE_PLAN_PLAN_CHANGES_H_
