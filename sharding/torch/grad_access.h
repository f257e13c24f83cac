// Notices calls of tensor.mutable_grad(): zero_grad() of modules and optimizers
// makes one for each parameter, and where .grad() is undefined, since an engine
// has taken the gradient, nothing else tells that it was called.
//
// How: the tensor's AutogradMeta is replaced by one of a class of ours with the
// same contents, whose mutable_grad() counts; it stays for the tensor's life.
// libtorch's accumulation calls mutable_grad() too, once for each gradient.
#ifndef SHARDING_TORCH_GRAD_ACCESS_H_
#define SHARDING_TORCH_GRAD_ACCESS_H_

#include <atomic>

#include "ATen/core/Tensor.h"

namespace tessera {

// The count of `tensor`, a leaf, from now on; null where its AutogradMeta is of
// a kind of its own (a view's), which is left alone. Valid while the tensor is
// alive; any thread may change it. Nobody else uses the tensor meanwhile.
// LOCAL.
std::atomic<int>* CountGradAccesses(const at::Tensor& tensor);

}  // namespace tessera
#endif  // SHARDING_TORCH_GRAD_ACCESS_H_
