// Why float32 on some processors. libtorch multiplies float16 and bfloat16 with
// oneDNN where the processor has instructions for them, and else in plain
// loops: on AMD's Zen 4 2.6 GFLOP/s of float16, where float32 has 100. So what
// is of such a dtype there is kept in float32 and rounded to the dtype by each
// operation. The numbers are of the same kind: libtorch's products of 16 bits
// are added up in float32, too, and rounded once.
#include "optim/matrix/newton_schulz.h"

#include <algorithm>
#include <optional>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/addmm.h"
#include "ATen/ops/mm.h"
#include "ATen/ops/norm.h"

namespace tessera {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kLeastNorm = 1e-7;
// Behind which step the gram iteration begins anew, from its rounding errors.
constexpr int64_t kRestart = 2;

// Whether step i + 1 needs R of this one.
bool GoesOn(int64_t i, int64_t steps) {
  return i + 1 < steps && i + 1 != kRestart;
}

// What libtorch itself asks before it multiplies on the CPU.
bool HasProducts(at::ScalarType dtype) {
  const auto asked = [](const char* name) {
    const auto schema =
        c10::Dispatcher::singleton().findSchema(c10::OperatorName(name, ""));
    return schema.has_value() && schema->typed<bool()>().call();
  };
  static const bool of_bfloat16 = asked("mkldnn::_is_mkldnn_bf16_supported");
  static const bool of_half = asked("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == at::kBFloat16 ? of_bfloat16
         : dtype == at::kHalf   ? of_half
                                : true;
}

// Operations on numbers of a dtype.
class Numbers {
 public:
  Numbers(at::ScalarType dtype, bool on_cpu)
      : dtype_(dtype), rounds_(on_cpu && !HasProducts(dtype)) {}

  at::Tensor Rounded(const at::Tensor& x) const {
    const at::Tensor rounded = x.to(dtype_);
    return rounds_ ? rounded.to(at::kFloat) : rounded;
  }
  at::Tensor Product(const at::Tensor& a, const at::Tensor& b) const {
    return Done(at::mm(a, b));
  }
  // b A + c A A
  at::Tensor Polynomial(const at::Tensor& a) const {
    return Done(at::addmm(a, a, a, /*beta=*/kB, /*alpha=*/kC));
  }
  // (a I + Z) X
  at::Tensor Applied(const at::Tensor& z, const at::Tensor& x) const {
    return Done(at::addmm(x, z, x, /*beta=*/kA, /*alpha=*/1));
  }
  // a I + Z
  at::Tensor Shifted(const at::Tensor& z) const {
    at::Tensor sum = z.clone();
    sum.diagonal().add_(kA);
    return Done(sum);
  }

 private:
  at::Tensor Done(const at::Tensor& x) const {
    return rounds_ ? Rounded(x) : x;
  }

  const at::ScalarType dtype_;
  const bool rounds_;  // what is computed in float32
};

at::Tensor Standard(const Numbers& of, at::Tensor x, int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    x = of.Applied(of.Polynomial(of.Product(x, x.t())), x);
  }
  return x;
}

at::Tensor Gram(const Numbers& of, at::Tensor x, int64_t steps) {
  at::Tensor r = of.Product(x, x.t());
  at::Tensor q;  // undefined: the identity
  for (int64_t i = 0; i < steps; ++i) {
    if (i == kRestart) {
      x = of.Product(q, x);
      r = of.Product(x, x.t());
      q.reset();
    }
    const at::Tensor z = of.Polynomial(r);
    q = q.defined() ? of.Applied(z, q) : of.Shifted(z);
    if (GoesOn(i, steps)) r = of.Applied(z, of.Applied(z, r));
  }
  return q.defined() ? of.Product(q, x) : x;
}

}  // namespace

at::Tensor Orthogonal(const at::Tensor& matrix,
                      const NewtonSchulzOptions& options) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = options.gram ? matrix : matrix.to(options.dtype);
  if (tall) x = x.t();
  const Numbers of(options.dtype, x.is_cpu());
  x = of.Rounded(x / x.norm().clamp_min(kLeastNorm));
  const bool gram = options.gram && x.size(0) < x.size(1);
  x = gram ? Gram(of, x, options.steps) : Standard(of, x, options.steps);
  if (tall) x = x.t();
  return x.to(matrix.scalar_type());
}

double OrthogonalFlops(int64_t rows, int64_t columns,
                       const NewtonSchulzOptions& options) {
  const auto n = static_cast<double>(std::min(rows, columns));
  const auto m = static_cast<double>(std::max(rows, columns));
  const auto steps = static_cast<double>(options.steps);
  const double wide = 2 * n * n * m, square = 2 * n * n * n;
  if (!options.gram || n == m) return steps * (2 * wide + square);
  double flops = (options.steps > kRestart ? 4 : 2) * wide;
  for (int64_t i = 0; i < options.steps; ++i) {
    const bool begins = i == 0 || i == kRestart;
    const bool goes_on = GoesOn(i, options.steps);
    flops += (1 + (begins ? 0 : 1) + (goes_on ? 2 : 0)) * square;
  }
  return flops;
}

}  // namespace tessera
