// CheckpointedSequential: Checkpointed over segments of a chain of modules.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_SEQUENTIAL_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_SEQUENTIAL_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"
#include "sharding/recompute/checkpointed/checkpointed.h"  // IWYU pragma: export
#include "torch/nn/modules/container/any.h"
#include "torch/nn/modules/container/sequential.h"

namespace tessera {

struct SequentialOptions {
  // Of each segment; its number is put behind the name.
  CheckpointOptions each;
  // Only each `every`-th segment is computed again, from the first one on.
  int every = 1;
  // The last segment is kept in any case (as by torch.utils.checkpoint): its
  // backward comes first, so its memory would be back at once. False: it is
  // not.
  bool keep_last = true;
};

// x through all modules, in `segments` segments as even as can be. A segment's
// modules take one tensor and give one. LOCAL. Throws InvalidArgument if
// `segments` is not in 1..number of modules, or `every` is below 1.
at::Tensor CheckpointedSequential(
    const std::vector<torch::nn::AnyModule>& modules, int segments,
    const at::Tensor& x, const SequentialOptions& options = {});
at::Tensor CheckpointedSequential(const torch::nn::Sequential& modules,
                                  int segments, const at::Tensor& x,
                                  const SequentialOptions& options = {});

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_SEQUENTIAL_H_
