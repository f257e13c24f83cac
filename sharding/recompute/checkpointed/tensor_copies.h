// Tensors over the memory of others: as spans of it, and in a role in a graph.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "base/torch/placed_tensor.h"

namespace tessera {

// The memory from a strided tensor's first element to its last, in one
// dimension: of an expanded one as much as it has, with the gaps of one that
// has some. And a tensor of such sizes and strides over it.
at::Tensor SpanOf(const at::Tensor& tensor);
at::Tensor OverSpan(const at::Tensor& span, at::IntArrayRef sizes,
                    at::IntArrayRef strides);

// How a tensor takes part in a graph.
struct GradRole {
  explicit GradRole(const at::Tensor& tensor)
      : requires_grad(tensor.requires_grad()), leaf(tensor.is_leaf()) {}
  bool requires_grad, leaf;
};
// A tensor over the same memory and version counter in that role, at the edge
// of a graph that is made for its saved tensors alone: a result of a node that
// throws where a tensor was no leaf, so that it may be written in place as such
// a tensor may.
at::Tensor InRole(const at::Tensor& tensor, GradRole role);

// Of the values, of whatever device and strides. Waits for the device.
uint64_t FingerprintOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_
