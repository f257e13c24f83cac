#include "base/torch/divide.h"

#include "ATen/ops/full.h"

namespace tessera {
namespace {

at::Tensor OnDeviceOf(const at::Tensor& t, double divisor) {
  return at::full({}, divisor, t.options().dtype(at::kDouble));
}

}  // namespace

void DivideBy(const at::Tensor& t, double divisor) {
  if (divisor == 1) return;
  t.is_cpu() ? t.div_(divisor) : t.div_(OnDeviceOf(t, divisor));
}

at::Tensor Divided(const at::Tensor& t, double divisor) {
  if (divisor == 1) return t;
  return t.is_cpu() ? t.div(divisor) : t.div(OnDeviceOf(t, divisor));
}

}  // namespace tessera
