// StepTime: predicts how long a step takes, from a trace and measured rates. An
// operator takes the longer of its products and the bytes that it moves;
// collectives count as far as computing does not hide them. Good for comparing
// ways of training the same model; effects of a processor's caches are not
// modelled.
#ifndef ENGINE_PLAN_STEP_TIME_H_
#define ENGINE_PLAN_STEP_TIME_H_

#include <cstdint>

#include "engine/plan/rates.h"

namespace tessera {

struct Recomputation;  // engine/plan/replay/recomputation.h
struct Trace;          // sharding/trace/trace.h

// The times of an optimizer step with all of its micro-batches.
struct StepSeconds {
  double compute = 0;        // forward and backward
  double recompute = 0;      // of activations, in backward
  double communication = 0;  // the part that is not hidden
  double update = 0;         // of masters and moments
  double offload = 0;        // a disk's time that all of these do not hide
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
  // Sums of shard groups over their replicas.
  int64_t replica_sums = 0, replica_bytes = 0;
  // Sending parameters to all ranks, after the update.
  int64_t publications = 0, published_bytes = 0;
};

// Bytes that a rank reads from a disk and writes to it in a step.
struct OffloadTraffic {
  int64_t read = 0, written = 0;  // bytes
};

// Returns the seconds of a micro-batch. `half`: products are of 16-bit floats.
double ComputeSeconds(const Trace& trace, const Rates& rates, bool half);
// Returns the seconds that recomputation takes, the recording of operators
// included.
double RecomputeSeconds(const Recomputation& recomputation, const Rates& rates,
                        bool half);
// Returns the seconds that `traffic` adds to a step that computes for
// `compute_seconds`.
double CommunicationSeconds(const StepTraffic& traffic, double compute_seconds,
                            const Rates& rates);
// Returns the seconds that `traffic` adds to a step that takes `seconds`
// without it; 0 where nothing is known of the disk. A disk that reads and
// writes at once is faster.
double OffloadSeconds(const OffloadTraffic& traffic, double seconds,
                      const Rates& rates);

}  // namespace tessera
#endif  // ENGINE_PLAN_STEP_TIME_H_
