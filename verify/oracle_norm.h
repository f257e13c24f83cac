// Computes the norm of a step's gradients for the oracle, in a slow and obvious
// way.
//
//   storage   | 64 elements | 64 elements | ...   blocks, from its element 0
//   parameter         [.....................]     its part of each of them
//
// Within a block there are eight sums in double, of elements j, j + 8, ...;
// they are added as ((0+1)+(2+3))+((4+5)+(6+7)). All blocks of all parameters
// are added exactly and rounded once, whatever their order.
#ifndef VERIFY_ORACLE_NORM_H_
#define VERIFY_ORACLE_NORM_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

// Returns the exact sum, rounded once to the nearest double, ties to even.
// Values are 0 or more; the result is infinite or NaN if one of them or the sum
// is.
double ExactSum(const std::vector<double>& values);

// A gradient, and where its parameter's elements lie in their storage.
struct PlacedGradient {
  at::Tensor gradient;  // real, of any strides
  std::vector<int64_t> strides;
  int64_t offset = 0;
};

// Returns the p-norm, p > 0 or infinite. It is infinite or NaN if an element
// is; NaN takes precedence.
double OracleNorm(const std::vector<PlacedGradient>& gradients, double p);

// Returns the factor that limits gradients of that norm to max_norm; 1 if
// max_norm is 0.
double OracleClipping(double norm, double max_norm);
// Scales down each row of a gradient (without `rows` all of it) whose norm /
// divisor exceeds `most` times the norm of the same row of `weights`, which
// counts as at least `eps`, to that limit.
at::Tensor OracleAdaptivelyClipped(const PlacedGradient& placed,
                                   const at::Tensor& weights, bool rows,
                                   double divisor, double most, double eps);
// Replaces elements beyond [-end, end] by the nearer end; NaN stays.
at::Tensor OracleClamped(const at::Tensor& t, double end);

}  // namespace tessera
#endif  // VERIFY_ORACLE_NORM_H_
