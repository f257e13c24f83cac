// Orthogonal: computes the nearest matrix with orthonormal rows or columns, U
// V^T of X = U S V^T, by a few Newton-Schulz steps of matrix products, as Muon
// does with a direction. Singular values end between about 0.7 and 1.2, not at
// 1.
//
//   X  /= |X| (Frobenius, 1e-7 at least); transposed, rows <= columns
//   standard, each step
//     A  = X X^T
//     X  = a X + (b A + c A A) X            a, b, c = 3.4445, -4.7750, 2.0315
//   gram, for rows < columns: the same on the small R = X X^T
//     Z  = b R + c R R
//     Q  = (a I + Z) Q
//     R  = (a I + Z) R (a I + Z)            begun anew behind the second step
//     and X = Q X at the end, and where it is begun anew
//
// Products and sums are rounded to `dtype`. A matrix's bits depend on it alone,
// on one machine: on the number of threads only as far as libtorch's products
// do.
//
// Sources: Jordan, "Muon", 2024; torch.optim.Muon, DeepSpeed's ns_method
// "standard" (bfloat16) and "gram" (float16).
#ifndef OPTIM_MATRIX_NEWTON_SCHULZ_H_
#define OPTIM_MATRIX_NEWTON_SCHULZ_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

struct NewtonSchulzOptions {
  int64_t steps = 5;
  bool gram = false;
  at::ScalarType dtype = at::kBFloat16;
};

// Returns the orthogonal matrix. `matrix`: [rows, columns], of any floating
// dtype and device; the result has its dtype. ASYNC on a device. LOCAL.
at::Tensor Orthogonal(const at::Tensor& matrix,
                      const NewtonSchulzOptions& options);

// Returns the operations of Orthogonal's matrix products, to distribute the
// work.
double OrthogonalFlops(int64_t rows, int64_t columns,
                       const NewtonSchulzOptions& options);

}  // namespace tessera
#endif  // OPTIM_MATRIX_NEWTON_SCHULZ_H_
