// MovedAutogradMeta: a tensor's AutogradMeta can be replaced by one of a class
// of ours with the same contents, whose virtual functions see calls of grad().
#ifndef BASE_TORCH_MOVED_AUTOGRAD_META_H_
#define BASE_TORCH_MOVED_AUTOGRAD_META_H_

#include <utility>

#include "torch/csrc/autograd/variable.h"

namespace tessera {

class MovedAutogradMeta : public torch::autograd::AutogradMeta {
 public:
  // Takes all contents of `other`, which is of libtorch's class itself, not of
  // one that is derived from it. REQUIRES: nobody else uses its tensor
  // meanwhile.
  explicit MovedAutogradMeta(torch::autograd::AutogradMeta* other) {
    name_ = std::move(other->name_);
    grad_ = std::move(other->grad_);
    grad_fn_ = std::move(other->grad_fn_);
    grad_accumulator_ = std::move(other->grad_accumulator_);
    fw_grad_ = std::move(other->fw_grad_);
    hooks_ = std::move(other->hooks_);
    cpp_hooks_list_ = std::move(other->cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(other->post_acc_grad_hooks_);
    requires_grad_ = other->requires_grad_;
    retains_grad_ = other->retains_grad_;
    is_view_ = other->is_view_;
    output_nr_ = other->output_nr_;
    grad_dtype_ = other->grad_dtype_;
    allow_grad_dtype_mismatch_ = other->allow_grad_dtype_mismatch_;
  }
};

}  // namespace tessera
#endif  // BASE_TORCH_MOVED_AUTOGRAD_META_H_
