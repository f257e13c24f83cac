// The inner loops of gradient norms: |x|^p summed over blocks of 64 elements,
// always in the same order, so that a block's bits do not depend on where a
// shard was cut, on vector width or on threads.
//
//   storage   |....|....|....|....|...   grid of blocks from element 0
//   segment      [-----------]            first = its place in the storage
//   result       s0   s1   s2             a block holds what is in the segment
//
// In a block, lane j of 8 adds the powers of its elements j, j + 8, ... in
// double, then ((l0+l1)+(l2+l3)) + ((l4+l5)+(l6+l7)). With p = infinity, "add"
// is "take the greater", and a NaN is the greatest. Complex numbers count as
// two elements (32 are a block), and |x| is their modulus.
//
// A whole p of at most 16 takes products from left to right, exact except for
// each product's rounding (squares of float32 are exact). Any other p calls
// pow, and complex numbers hypot: those bits may differ between kinds of
// processors and devices; all others are the same on all.
#ifndef OPTIM_NORM_BLOCK_POWERS_H_
#define OPTIM_NORM_BLOCK_POWERS_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

// Elements of a block.
constexpr int64_t kNormBlock = 64;

// Returns one number per block that the segment touches. Uses libtorch's
// threads, some 15 GB/s on one for float32 and p = 2. Throws c10::Error
// (another dtype than those below, memory). LOCAL. REQUIRES: `segment` is on
// the CPU, contiguous, [n], n > 0, of float16, bfloat16, float32, float64,
// complex64 or complex128; 0 <= first, in the segment's dtype; p > 0.
std::vector<double> BlockPowers(const at::Tensor& segment, int64_t first,
                                double p);

// Computes BlockPowers on any device, as [blocks] of float64 there, by
// libtorch's operators. ASYNC: on the current stream.
at::Tensor BlockPowersByOperators(const at::Tensor& segment, int64_t first,
                                  double p);

}  // namespace tessera
#endif  // OPTIM_NORM_BLOCK_POWERS_H_
