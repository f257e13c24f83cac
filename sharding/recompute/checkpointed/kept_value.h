// KeptValue: a tensor that a region keeps, as autograd would keep it there. So
// what a region within another one keeps is the outer region's to compute again
// (sharding/dispatch/saved_tensors.h), and of a parameter it is an alias.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_VALUE_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_VALUE_H_

#include <memory>

#include "ATen/core/Tensor.h"

namespace torch::autograd {
struct SavedVariableHooks;
}

namespace tessera {

class OperatorWatch;

class KeptValue {
 public:
  KeptValue();
  // `outer` is told (null: nobody).
  KeptValue(const at::Tensor& tensor, OperatorWatch* outer);
  ~KeptValue();
  KeptValue(KeptValue&&) noexcept;
  KeptValue& operator=(KeptValue&&) noexcept;

  bool kept() const { return saved_ != nullptr || inference_.defined(); }
  // Without history. Throws libtorch's error of a changed version.
  at::Tensor Get() const;

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> saved_;
  at::Tensor inference_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_VALUE_H_
