#include "sharding/recompute/checkpointed/kept_value.h"

#include "ATen/core/grad_mode.h"
#include "base/check.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/saved_tensors.h"
#include "torch/csrc/autograd/saved_variable_hooks.h"

namespace tessera {

KeptValue::KeptValue() = default;
KeptValue::~KeptValue() = default;
KeptValue::KeptValue(KeptValue&&) noexcept = default;
KeptValue& KeptValue::operator=(KeptValue&&) noexcept = default;

KeptValue::KeptValue(const at::Tensor& tensor, OperatorWatch* outer) {
  if (tensor.is_inference()) {  // has no versions, is never saved
    inference_ = tensor;
    return;
  }
  WatchScope scope(outer);
  saved_ = SaveTensor(tensor);
}

at::Tensor KeptValue::Get() const {
  if (inference_.defined()) return inference_;
  // A cast of a parameter is remembered as one where a graph is made of it.
  at::AutoGradMode grad(true);
  TESSERA_CHECK(saved_ != nullptr) << "was given up";
  return saved_->call_unpack_hook();
}

}  // namespace tessera
