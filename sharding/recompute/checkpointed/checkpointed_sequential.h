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
  // Options of each segment; its number is appended to the name.
  CheckpointOptions each;
  // Only every `every`-th segment is recomputed, from the first one on.
  int every = 1;
  // Keeps the last segment (as torch.utils.checkpoint does): its backward comes
  // first, so its memory would be needed again at once.
  bool keep_last = true;
};

// Runs x through all modules, in `segments` segments as even as possible. Each
// module takes one tensor and returns one. LOCAL. Throws InvalidArgument if
// `segments` is not in 1..number of modules, or `every` is below 1.
at::Tensor CheckpointedSequential(
    const std::vector<torch::nn::AnyModule>& modules, int segments,
    const at::Tensor& x, const SequentialOptions& options = {});
at::Tensor CheckpointedSequential(const torch::nn::Sequential& modules,
                                  int segments, const at::Tensor& x,
                                  const SequentialOptions& options = {});

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_SEQUENTIAL_H_
