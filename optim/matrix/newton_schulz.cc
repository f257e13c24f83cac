#include "optim/matrix/newton_schulz.h"

#include <algorithm>

#include "ATen/ops/addmm.h"
#include "ATen/ops/mm.h"
#include "ATen/ops/norm.h"

namespace tessera {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kLeastNorm = 1e-7;
// Behind which step the gram iteration begins anew, from its rounding errors.
constexpr int64_t kRestart = 2;

// b A + c A A
at::Tensor Polynomial(const at::Tensor& a) {
  return at::addmm(a, a, a, /*beta=*/kB, /*alpha=*/kC);
}

// (a I + Z) X
at::Tensor Applied(const at::Tensor& z, const at::Tensor& x) {
  return at::addmm(x, z, x, /*beta=*/kA, /*alpha=*/1);
}

at::Tensor Standard(at::Tensor x, int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    x = Applied(Polynomial(at::mm(x, x.t())), x);
  }
  return x;
}

at::Tensor Gram(at::Tensor x, int64_t steps) {
  at::Tensor r = at::mm(x, x.t());
  at::Tensor q;  // undefined: the identity
  for (int64_t i = 0; i < steps; ++i) {
    if (i == kRestart) {
      x = at::mm(q, x);
      r = at::mm(x, x.t());
      q.reset();
    }
    const at::Tensor z = Polynomial(r);
    if (q.defined()) {
      q = Applied(z, q);
    } else {
      q = z.clone();
      q.diagonal().add_(kA);
    }
    const bool goes_on = i + 1 < steps && i + 1 != kRestart;
    if (!goes_on) continue;
    const at::Tensor zr = Applied(z, r);
    r = at::addmm(zr, z, zr, /*beta=*/kA, /*alpha=*/1);
  }
  return q.defined() ? at::mm(q, x) : x;
}

}  // namespace

at::Tensor Orthogonal(const at::Tensor& matrix,
                      const NewtonSchulzOptions& options) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = options.gram ? matrix : matrix.to(options.dtype);
  if (tall) x = x.t();
  x = (x / x.norm().clamp_min(kLeastNorm)).to(options.dtype);
  const bool gram = options.gram && x.size(0) < x.size(1);
  x = gram ? Gram(x, options.steps) : Standard(x, options.steps);
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
  return 4 * wide + steps * 4 * square;
}

}  // namespace tessera
