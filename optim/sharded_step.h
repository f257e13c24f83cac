// One optimizer step over the shards of all flats: the global gradient norm,
// clipping by it, what loss scaling and weights divide by, the optimizer.
//
//   values  gradients / divisor within [-max_value, max_value], element by
//           element; NaN stays
//   units   of groups with adaptive_clipping, between values and norms
//           (optim/gradients/adaptive_clipping.h)
//   norm    of every parameter that has a gradient, each once, in exact sums
//           (optim/norm/grad_norm.h): the same bits at every stage and world
//           size
//   factor  1 / divisor, times max_norm / (norm + 1e-6) if that is below 1
//   step    with gradients * factor, flat by flat, each published when done
//
// A group of parameters with a max_norm of its own has its own norm, and does
// not count in the others' norm, as if clip_grad_norm_ were called for the
// group and once more for all the rest. Then the gradients are first multiplied
// by the factors of clipping, rounded to their dtype, and the step's factor is
// 1 / divisor.
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
#include "optim/step_decision.h"
#include "optim/step_outcome.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// Steps `optimizer` with the step's gradients / divisor, and publishes each
// flat that was stepped while it is in the caches
// (FlatParameter::PublishOwned): its new values reach the other ranks, and its
// parameters' versions say so. Gradients may be changed. `comm`: the job.
// Internal where a norm is asked for and differs between replicas;
// ResourceExhausted and errors of a disk where clipping reads gradients there.
// REQUIRES: no early steps with what changes gradients in place
// (changes_gradients), and FlatParameter::PrepareUpdate of all. COLLECTIVE
// where a norm is asked for (one small exchange), with adaptive_clipping, and
// as ShardedOptimizer::Step and PublishOwned are.
//
// Where the outcome is pending, StepOutcome::Take returns the error of
// replicas, and its caller calls StepCounts::Uncount for a step that was
// skipped; such a step publishes the old values.
absl::StatusOr<StepOutcome> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    Gradients* gradients, double divisor, const ShardedStepOptions& options,
    ShardedOptimizer* optimizer, Communicator* comm);

}  // namespace tessera
#endif  // OPTIM_SHARDED_STEP_H_
