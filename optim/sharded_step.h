// One optimizer step over the shards of all flats: the global gradient norm,
// clipping by it, what loss scaling and weights divide by, the optimizer.
//
//   norm    of every parameter that has a gradient, each once, in exact sums
//           (optim/grad_norm.h): the same bits at every stage and world size
//   factor  1 / divisor, times max_norm / (norm + 1e-6) if that is below 1
//   step    with gradients * factor, flat by flat, each published when done
//
// On devices that have kernels for it (optim/device_kernels.h) all of that is
// given to the current stream, and the outcome is not known yet.
//
// Sources: gradient clipping as DeepSpeed's gradient_clipping and
// torch.nn.utils.clip_grad_norm_; skipped steps as in Micikevicius et al.,
// "Mixed Precision Training", 2018.
#ifndef OPTIM_SHARDED_STEP_H_
#define OPTIM_SHARDED_STEP_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "optim/sharded_optimizer.h"
#include "optim/step_outcome.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

struct ShardedStepOptions {
  double max_norm = 0;   // 0: no clipping
  double norm_type = 2;  // p > 0, or infinity
  // A step with a gradient that is not finite is skipped, on all ranks.
  bool skip_on_overflow = false;
  bool report_norm = false;  // even if neither asks for it
};

// Steps `optimizer` with the step's gradients / divisor, and publishes each
// flat that was stepped while it is in the caches
// (FlatParameter::PublishOwned): its new values reach the other ranks, and its
// parameters' versions say so. Gradients may be changed. `comm`: all ranks,
// those of the units' shard group and its replicas, in this order. Internal
// where a norm is asked for and differs between replicas. REQUIRES:
// FlatParameter::PrepareUpdate of all. COLLECTIVE where a norm is asked for
// (one small exchange), and as PublishOwned is.
//
// Where the outcome is pending, who Takes it gets the error of replicas, and
// calls optimizer->Uncount for a step that was skipped; such a step publishes
// the values that were there.
absl::StatusOr<StepOutcome> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    Gradients* gradients, double divisor, const ShardedStepOptions& options,
    ShardedOptimizer* optimizer, Communicator* comm);

}  // namespace tessera
#endif  // OPTIM_SHARDED_STEP_H_
