// The norm of a step's gradients as the oracle works it out: slow and obvious.
//
//   storage   | 64 elements | 64 elements | ...   blocks, from its element 0
//   parameter         [.....................]     its part of each of them
//
// Within a block eight sums in double, of elements j, j + 8, ...; these added
// as ((0+1)+(2+3))+((4+5)+(6+7)). All blocks of all parameters exactly, rounded
// once, whatever their order.
#ifndef VERIFY_ORACLE_NORM_H_
#define VERIFY_ORACLE_NORM_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

// The exact sum, rounded once to the nearest double, ties to even. Values are 0
// or more; infinite or NaN if one of them or the sum is.
double ExactSum(const std::vector<double>& values);

// A gradient and where its parameter's elements lie in their storage.
struct PlacedGradient {
  at::Tensor gradient;  // real, of any strides
  std::vector<int64_t> strides;
  int64_t offset = 0;
};

// The p-norm, p > 0 or infinite; infinite or NaN if an element is (NaN goes
// before).
double OracleNorm(const std::vector<PlacedGradient>& gradients, double p);

// What gradients of that norm are multiplied with, so that it is max_norm at
// most; 1 where max_norm is 0.
double OracleClipping(double norm, double max_norm);
// Each row of a gradient (all of it, without `rows`), whose norm, divided, is
// more than `most` times that of the same row of `weights`, or than `most *
// eps`, scaled down to that.
at::Tensor OracleAdaptivelyClipped(const PlacedGradient& placed,
                                   const at::Tensor& weights, bool rows,
                                   double divisor, double most, double eps);
// Elements beyond [-end, end] are the nearer of these; NaN stays.
at::Tensor OracleClamped(const at::Tensor& t, double end);

}  // namespace tessera
#endif  // VERIFY_ORACLE_NORM_H_
