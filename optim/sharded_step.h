// One optimizer step over the shards of all flats: the global gradient norm,
// clipping by it, what loss scaling and weights divide by, AdamW.
//
//   norm    of every parameter that has a gradient, each once, in exact sums
//           (optim/grad_norm.h): the same bits at every stage and world size
//   factor  1 / divisor, times max_norm / (norm + 1e-6) if that is below 1
//   AdamW   with gradients * factor, flat by flat, each published when done
//
// Sources: gradient clipping as DeepSpeed's gradient_clipping and
// torch.nn.utils.clip_grad_norm_; skipped steps as in Micikevicius et al.,
// "Mixed Precision Training", 2018.
#ifndef OPTIM_SHARDED_STEP_H_
#define OPTIM_SHARDED_STEP_H_

#include <limits>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "optim/adamw.h"
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

struct ShardedStepResult {
  bool skipped = false;
  // Of the gradients divided by the divisor, before clipping and after; NaN if
  // the options do not ask for it.
  double grad_norm = std::numeric_limits<double>::quiet_NaN();
  double clipped_norm = std::numeric_limits<double>::quiet_NaN();
};

// Steps `optimizer` with the step's gradients / divisor, and publishes each
// flat that was stepped while it is in the caches
// (FlatParameter::PublishOwned): its new values reach the other ranks, and its
// parameters' versions say so. Gradients may be changed. `comm`: all ranks,
// those of the units' shard group and its replicas, in this order. Internal
// where a norm is asked for and differs between replicas. REQUIRES:
// FlatParameter::PrepareUpdate of all. COLLECTIVE where a norm is asked for
// (one small exchange), and as PublishOwned is.
absl::StatusOr<ShardedStepResult> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, double divisor,
    const ShardedStepOptions& options, AdamW* optimizer, Communicator* comm);

}  // namespace tessera
#endif  // OPTIM_SHARDED_STEP_H_
