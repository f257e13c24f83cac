// Makes tensors over the memory of others: as spans of it, and in a role in a
// graph.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "base/torch/placed_tensor.h"

namespace tessera {

// SpanOf returns the memory from a strided tensor's first element to its last,
// gaps included, in one dimension. OverSpan makes a tensor of given sizes and
// strides over it.
at::Tensor SpanOf(const at::Tensor& tensor);
at::Tensor OverSpan(const at::Tensor& span, at::IntArrayRef sizes,
                    at::IntArrayRef strides);

// How a tensor takes part in a graph of autograd.
struct GradRole {
  explicit GradRole(const at::Tensor& tensor)
      : requires_grad(tensor.requires_grad()), leaf(tensor.is_leaf()) {}
  bool requires_grad, leaf;
};
// Returns a tensor over the same memory and version counter in that role, at
// the edge of a graph that is made only for its saved tensors. Where the tensor
// was no leaf, it is a result of a node that throws, so that it may be written
// in place as such a tensor may.
at::Tensor InRole(const at::Tensor& tensor, GradRole role);

// Returns a fingerprint of the values, for any device and strides; 0 where this
// rank has none (a stage of a pipeline). Waits for the device.
uint64_t FingerprintOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_TENSOR_COPIES_H_
