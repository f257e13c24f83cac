// Sums of lines (rows or columns of a matrix) of numbers of at least 0, with
// bits that depend neither on how shards cut the lines nor on any order:
//
//   bin     b, the least of -36 to 36 with all of the line below 2^(16 b)
//   digits  L = 53 - ceil(log2 n) of a line of n numbers
//   halves  high: the number cut off to a multiple of 2^(16 b - L)
//           low: what is left, cut off to one of 2^(16 b - 2 L)
//
// Sums of halves are whole numbers of at most 2^53 such units: float64 adds
// them exactly, in any order, over elements and over ranks. The line's sum is
// that of both, rounded once: it is what the exact sum is, except for what was
// cut off, n * 2^(16 b - 2 L). That is 2^(3 log2 n - 90) of the largest number
// at most (2^-60 for n = 1024), for numbers above 2^-592.
//
// The only collective needed is a sum: a line's bin is the largest of the
// ranks' bins, each rank gives 2^(28 b), and the sum of fewer than 2^15 of
// these shows the largest b.
//
// An infinite number makes the sum infinite, so does one from 2^576 on, and a
// NaN makes it NaN, even beside those.
#ifndef OPTIM_FACTORED_LINE_SUMS_H_
#define OPTIM_FACTORED_LINE_SUMS_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

// All tensors are float64 unless said otherwise. LOCAL, ASYNC on devices. Throw
// c10::Error.

// Returns the digits of a line of n numbers; n >= 1.
int64_t DigitsOf(int64_t n);

// Returns 2^(28 b) for the largest of a line's numbers on this rank, 0 for 0;
// an infinity or NaN stays. Any shape.
at::Tensor BinPowers(const at::Tensor& largest);

// How the lines are cut. All [lines], or of one shape.
struct LineCuts {
  // `powers`: of BinPowers, summed over ranks; `digits`: int64.
  LineCuts(const at::Tensor& powers, const at::Tensor& digits);
  // From sums of halves.
  at::Tensor Sums(const at::Tensor& high, const at::Tensor& low) const;

  at::Tensor to_high;  // a number * this, cut off: units of the high half
  at::Tensor to_low;   // what is left of that * this: of the low one

 private:
  at::Tensor powers_, unit_, low_unit_;
};

// Adds the sums over `dim`, which is kept, of the halves of `numbers` to `high`
// and `low`. `to_high` and the rest are [.., 1, ..].
void AddHalves(const at::Tensor& numbers, int64_t dim,
               const at::Tensor& to_high, const at::Tensor& to_low,
               const at::Tensor& high, const at::Tensor& low);

// Returns the sums of lines that are whole on this rank, over `dim`, which is
// kept.
at::Tensor WholeLineSums(const at::Tensor& numbers, int64_t dim);

}  // namespace tessera
#endif  // OPTIM_FACTORED_LINE_SUMS_H_
