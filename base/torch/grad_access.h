// Notices calls of tensor.mutable_grad() and tensor.grad(). Of each parameter
// zero_grad() of modules and optimizers asks for the first, clip_grad_norm_()
// and an optimizer's step() for the second; where it is undefined, since an
// engine has taken the gradient, nothing else tells that they were called.
//
// How: the tensor's AutogradMeta is replaced by one of a class of ours with the
// same contents, which counts; it stays for the tensor's life. libtorch's
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

// The counts of `tensor`, a leaf, from now on; null where its AutogradMeta is
// of a kind of its own (a view's), which is left alone. Valid while the tensor
// is alive; any thread may change it. Nobody else uses the tensor meanwhile.
// LOCAL.
GradAccesses* CountGradAccesses(const at::Tensor& tensor);

// tensor.grad() of a leaf, not counted. LOCAL.
at::Tensor PeekGrad(const at::Tensor& tensor);

}  // namespace tessera
#endif  // BASE_TORCH_GRAD_ACCESS_H_
