// Notices calls of tensor.mutable_grad() and tensor.grad(). zero_grad() of
// modules and optimizers calls the first for each parameter, clip_grad_norm_()
// and an optimizer's step() the second. Where the gradient is undefined, since
// an engine has taken it, nothing else shows that they were called.
//
// The tensor's AutogradMeta is replaced by one of a class of ours with the same
// contents, which counts; it stays for the tensor's life. libtorch's
// accumulation calls mutable_grad() too, once for each gradient.
#ifndef BASE_TORCH_GRAD_ACCESS_H_
#define BASE_TORCH_GRAD_ACCESS_H_

#include <atomic>

#include "ATen/core/Tensor.h"

namespace tessera {

struct GradAccesses {
  std::atomic<int> changes = 0;        // mutable_grad()
  mutable std::atomic<int> looks = 0;  // grad(), where it is undefined
};

// Returns the counts of `tensor`, a leaf, from now on; null where its
// AutogradMeta is of another kind (a view's), which is left alone. The counts
// are valid while the tensor is alive; any thread may change them. REQUIRES:
// nobody else uses the tensor meanwhile. LOCAL.
GradAccesses* CountGradAccesses(const at::Tensor& tensor);

// Returns tensor.grad() of a leaf without counting the call. LOCAL.
at::Tensor PeekGrad(const at::Tensor& tensor);

}  // namespace tessera
#endif  // BASE_TORCH_GRAD_ACCESS_H_
