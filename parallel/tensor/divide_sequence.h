// DivideSequence: what a program calls on the inputs of a forward, with
// sequence_parallel_size above 1.
//
//   at::Tensor tokens = ...;                                // [B, T]
//   tokens = tessera::DivideSequence(*model, tokens, 1);
//   at::Tensor loss = model->loss(tokens, targets);
//
// From there each rank of a sequence-parallel group has its part of the
// positions, in all that is computed of it: the module sees whole sizes. Layers
// that treat positions alike work on parts; attention exchanges parts of
// positions for some of the heads and back (DeepSpeed-Ulysses; Jacobs et al.,
// 2023), or gathers keys and values where the ranks do not divide the heads.
// Losses are means over all positions. Other operators gather, with one line in
// the log, and are right.
#ifndef PARALLEL_TENSOR_DIVIDE_SEQUENCE_H_
#define PARALLEL_TENSOR_DIVIDE_SEQUENCE_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Returns `whole`, which all ranks of the group have, with this rank's part of
// dimension `dim` in place of its memory; `whole` itself if no engine with
// sequence_parallel_size above 1 has the module. Targets may stay whole. Throws
// StatusException: InvalidArgument if there is no such dimension, or the ranks
// do not divide it (fill sequences up, and leave what was added out of the
// loss, as by ignore_index). LOCAL.
at::Tensor DivideSequence(const torch::nn::Module& module,
                          const at::Tensor& whole, int64_t dim);

// Returns the whole of a tensor that is divided among ranks, parameters
// included, as an ordinary one, through autograd: for what needs its memory
// (printing, accessors). Any other tensor is returned as it is. COLLECTIVE over
// the tensor- or sequence-parallel group if it is divided.
at::Tensor Whole(const at::Tensor& tensor);

}  // namespace tessera
#endif  // PARALLEL_TENSOR_DIVIDE_SEQUENCE_H_
