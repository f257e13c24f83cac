#include "optim/factored/line_sums.h"

#include "ATen/ops/amax.h"
#include "ATen/ops/floor.h"
#include "ATen/ops/frexp.h"
#include "ATen/ops/full.h"
#include "ATen/ops/isfinite.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros_like.h"

namespace tessera {
namespace {

constexpr int64_t kBinBits = 16, kPowerBits = 28, kMostBin = 36;
constexpr double kInfinite = 0x1p576;  // from here on

// 2^exponent of int64 ones from -1022 to 1023, by their bits: libtorch's exp2
// and pow need not be exact.
at::Tensor PowerOfTwo(const at::Tensor& exponent) {
  return exponent.add(1023).bitwise_left_shift(52).view(at::kDouble);
}

// ceil(x / d) and floor(x / d) of integers.
at::Tensor CeilOf(const at::Tensor& x, int64_t d) {
  return x.add(d - 1).div(d, "floor");
}

// e with |x| in [2^(e - 1), 2^e); int64. REQUIRES: finite, not 0.
at::Tensor ExponentOf(const at::Tensor& x) {
  return std::get<1>(at::frexp(x)).to(at::kLong);
}

}  // namespace

int64_t DigitsOf(int64_t n) {
  int64_t digits = 53;
  while (digits > 1 && (int64_t{1} << (53 - digits)) < n) --digits;
  return digits;
}

at::Tensor BinPowers(const at::Tensor& largest) {
  const at::Tensor normal = largest.gt(0).logical_and(largest.lt(kInfinite));
  const at::Tensor bin =
      CeilOf(ExponentOf(largest.masked_fill(normal.logical_not(), 1)), kBinBits)
          .clamp_min(-kMostBin);
  // 0 and NaN stay, what is left is infinite or becomes so.
  const at::Tensor other = largest * HUGE_VAL;
  return at::where(normal, PowerOfTwo(bin * kPowerBits),
                   at::where(largest.eq(0), largest, other));
}

LineCuts::LineCuts(const at::Tensor& powers, const at::Tensor& digits)
    : powers_(powers) {
  const at::Tensor normal = powers.gt(0).logical_and(at::isfinite(powers));
  const at::Tensor exponent =
      ExponentOf(powers.masked_fill(normal.logical_not(), 1))
          .sub(1)
          .div(kPowerBits, "floor")
          .mul(kBinBits);
  to_high = PowerOfTwo(digits - exponent);
  to_low = PowerOfTwo(digits);
  unit_ = PowerOfTwo(exponent - digits);
  low_unit_ = PowerOfTwo(exponent - digits * 2);
}

at::Tensor LineCuts::Sums(const at::Tensor& high, const at::Tensor& low) const {
  const at::Tensor sums = (high * unit_).add(low * low_unit_);
  return at::where(at::isfinite(powers_), sums, powers_);
}

void AddHalves(const at::Tensor& numbers, int64_t dim,
               const at::Tensor& to_high, const at::Tensor& to_low,
               const at::Tensor& high, const at::Tensor& low) {
  const at::Tensor scaled = numbers * to_high;
  const at::Tensor whole = at::floor(scaled);
  high.add_(whole.sum(dim, /*keepdim=*/true));
  low.add_(scaled.sub_(whole).mul_(to_low).floor_().sum(dim, /*keepdim=*/true));
}

at::Tensor WholeLineSums(const at::Tensor& numbers, int64_t dim) {
  const at::Tensor powers = BinPowers(at::amax(numbers, dim, /*keepdim=*/true));
  const at::Tensor digits =
      at::full(powers.sizes(), DigitsOf(numbers.size(dim)),
               powers.options().dtype(at::kLong));
  const LineCuts cuts(powers, digits);
  const at::Tensor high = at::zeros_like(powers), low = at::zeros_like(powers);
  AddHalves(numbers, dim, cuts.to_high, cuts.to_low, high, low);
  return cuts.Sums(high, low);
}

}  // namespace tessera
