#include "base/torch/divide.h"

#include "ATen/ops/full.h"

namespace tessera {
namespace {

at::Tensor OnDeviceOf(const at::Tensor& t, double divisor) {
  return at::full({}, divisor, t.options().dtype(at::kDouble));
}

// On a device the divisor, a tensor there, is converted to the type of `t`; on
// the CPU it stays a float beside 16-bit numbers, which are divided as floats.
bool IsRoundedIn(at::ScalarType type, double divisor) {
  return at::isReducedFloatingType(type) &&
         at::full({}, divisor, type).item<double>() != divisor;
}

at::Tensor ByFloats(const at::Tensor& t, double divisor) {
  const at::Tensor wide = t.to(at::kFloat);
  return wide.div_(OnDeviceOf(wide, divisor)).to(t.scalar_type());
}

}  // namespace

void DivideBy(const at::Tensor& t, double divisor) {
  if (divisor == 1) return;
  if (t.is_cpu()) {
    t.div_(divisor);
  } else if (IsRoundedIn(t.scalar_type(), divisor)) {
    t.copy_(ByFloats(t, divisor));
  } else {
    t.div_(OnDeviceOf(t, divisor));
  }
}

}  // namespace tessera
