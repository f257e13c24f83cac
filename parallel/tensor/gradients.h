// Gradients of placed tensors: grad(), retain_grad(), hooks, requires_grad_()
// and set_data() of a placed tensor are those of its part.
//
//   leaf.grad()             a placed tensor of part.grad(), made by the call
//   leaf.mutable_grad()     part.mutable_grad() itself: what zero_grad() of
//                           modules and optimizers resets or zeroes. What is
//                           assigned may be whole: it becomes the part's
//   leaf.register_hook()    gets the part's gradient as a placed tensor. What
//                           the hook returns, whole or placed, replaces it
//   post-accumulate hooks   of the leaf are called with the leaf, before those
//                           that are set on the part later
//   leaf.requires_grad_()   of the part, too; set_requires_grad() is not seen
//   leaf.set_data()         of the part, with a tensor that is divided alike
//                           (Module::to)
//   register_hook() and retain_grad() of what an operator made: as a leaf's, by
//                           the node of the part
//
// The gradient of a copy is this rank's addend, an ordinary tensor.
//
// Only grad() holds the part's gradient in addition, until the next gradient or
// call of mutable_grad().
#ifndef PARALLEL_TENSOR_GRADIENTS_H_
#define PARALLEL_TENSOR_GRADIENTS_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "parallel/tensor/part_group.h"
#include "parallel/tensor/placed.h"

namespace tessera {

// Returns a part's gradient as that of the tensor, or undefined as it is.
at::Tensor PlacedGradient(at::Tensor gradient, const TensorPlacement& placement,
                          const std::shared_ptr<PartGroup>& group);
// Returns this rank's part of a gradient of the tensor. COLLECTIVE if that is
// placed otherwise.
at::Tensor PartOfGradient(const at::Tensor& gradient,
                          const TensorPlacement& placement,
                          const std::shared_ptr<PartGroup>& group);

// Whether autograd goes on from `tensor`, which is placed, by its part. False:
// by a node of a user's function, or not at all. (placed.cc)
bool GoesOnByPart(const at::Tensor& tensor);

// Has the gradients of a placed leaf go to its part, if that requires them.
// (placed.cc)
void ConnectLeaf(const at::Tensor& leaf);
// Has the part's gradient run the hooks of the leaf. Once for a part.
void FollowPart(const at::Tensor& leaf);
// Has grad() of a placed tensor be that of its part.
void MirrorGradient(const at::Tensor& tensor);

}  // namespace tessera
#endif  // PARALLEL_TENSOR_GRADIENTS_H_
