// Computes Adafactor's direction of a whole parameter, in a slow and obvious
// way.
//
//   sum of a line's n squares of g, each in float64: all are cut off to
//   multiples of 2^(16 b - 2 L) and added exactly, rounded once. b is the least
//   number from -36 on with all below 2^(16 b), L = 53 - ceil(log2 n). Infinite
//   if one is not below 2^576, NaN if one is.
//
//   w          step^beta2_decay; states in float64, rounded to T
//   row_var    (sum over a row / n - row_var) * w + row_var; col_var alike
//   variance   (g^2 - variance) * w + variance, of fewer than two dims
//   row        row_var / max(eps, such a sum of a matrix's row_var / R), in
//              float64, rounded to T
//   V          row * col_var, or variance, in T
//   direction  g / sqrt(max(eps^2, V)), in T
#ifndef VERIFY_FACTORED_ORACLE_ADAFACTOR_H_
#define VERIFY_FACTORED_ORACLE_ADAFACTOR_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

struct OracleAdafactor {
  double beta2_decay = -0.8;
  double eps = 0;  // 0: T's epsilon
  bool maximize = false;
};

// Returns zeros: [..., R, 1] and [..., 1, C] for a master of [..., R, C]; the
// master's shape for fewer dims.
std::vector<at::Tensor> OracleAdafactorStates(const at::Tensor& master);

// T is float or double, the dtype of the gradient and of the states, which
// change.
at::Tensor OracleAdafactorDirection(const std::vector<at::Tensor>& states,
                                    const at::Tensor& gradient, int64_t step,
                                    const OracleAdafactor& options);

}  // namespace tessera
#endif  // VERIFY_FACTORED_ORACLE_ADAFACTOR_H_
