// StepTime: how long a step will take, from a trace and measured rates: of each
// operator what takes longer, its products or the bytes that it moves; of
// collectives what computing does not hide. Good for comparing ways of training
// the same model; what a processor's caches make of an operator is not in it.
#ifndef ENGINE_PLAN_STEP_TIME_H_
#define ENGINE_PLAN_STEP_TIME_H_

#include <cstdint>

#include "engine/plan/rates.h"

namespace tessera {

struct Recomputation;  // engine/plan/replay/recomputation.h
struct Trace;          // sharding/trace/trace.h

// Of an optimizer step, all of its micro-batches together.
struct StepSeconds {
  double compute = 0;        // forward and backward
  double recompute = 0;      // of activations, in backward
  double communication = 0;  // that is not hidden
  double update = 0;         // of masters and moments
  double offload = 0;        // of a disk, that all of these do not hide
  double total() const {
    return compute + recompute + communication + update + offload;
  }
};

// Collectives of a step, by what they move.
struct StepTraffic {
  int64_t gathers = 0, gathered_bytes = 0;  // of parameters, before their use
  int64_t reductions = 0, reduced_bytes = 0;
  bool all_reduces = false;  // stage 0
  bool overlaps = true;      // they run while the model computes
  // Of shard groups, over their replicas.
  int64_t replica_sums = 0, replica_bytes = 0;
  // Of parameters to all ranks, after the update.
  int64_t publications = 0, published_bytes = 0;
};

// By a rank in a step, from a disk and to it.
struct OffloadTraffic {
  int64_t read = 0, written = 0;  // bytes
};

// Of a micro-batch. `half`: products are of 16-bit floats.
double ComputeSeconds(const Trace& trace, const Rates& rates, bool half);
// The same, of what runs again; and all that may have to is recorded.
double RecomputeSeconds(const Recomputation& recomputation, const Rates& rates,
                        bool half);
// What `traffic` adds to a step that computes for `compute_seconds`.
double CommunicationSeconds(const StepTraffic& traffic, double compute_seconds,
                            const Rates& rates);
// What `traffic` adds to a step that takes `seconds` without; 0 where nothing
// is known of the disk. A disk that does both at once is faster.
double OffloadSeconds(const OffloadTraffic& traffic, double seconds,
                      const Rates& rates);

}  // namespace tessera
#endif  // ENGINE_PLAN_STEP_TIME_H_
