#include "optim/gradients/clipping.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "ATen/Dispatch.h"
#include "ATen/ops/clamp.h"
#include "ATen/ops/isinf.h"
#include "ATen/ops/where.h"
#include "base/check.h"
#include "optim/gradients/owned_gradients.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

// Elements that are changed at once where that needs memory.
constexpr int64_t kClippedAtOnce = int64_t{1} << 22;

// A finite number of the dtype: a scalar beyond it would be refused.
double Within(double bound, at::ScalarType dtype) {
  return std::min(
      bound,
      AT_DISPATCH_FLOATING_TYPES_AND2(
          at::kHalf, at::kBFloat16, dtype, "ClampGradients", [] {
            return static_cast<double>(std::numeric_limits<scalar_t>::max());
          }));
}

void Clamp(const at::Tensor& segment, double bound, bool keep_infinite) {
  const double end = Within(bound, segment.scalar_type());
  if (!keep_infinite) {
    segment.clamp_(-end, end);
    return;
  }
  for (int64_t begin = 0; begin < segment.numel(); begin += kClippedAtOnce) {
    const at::Tensor part = segment.narrow(
        0, begin, std::min(kClippedAtOnce, segment.numel() - begin));
    part.copy_(at::where(at::isinf(part), part, at::clamp(part, -end, end)));
  }
}

// Multiplies gradients of 16 bits as floats, rounded once: mul_ would round the
// factor to 16 bits, too.
void Multiply(const at::Tensor& segment, double factor) {
  if (!at::isReducedFloatingType(segment.scalar_type())) {
    segment.mul_(factor);
    return;
  }
  for (int64_t begin = 0; begin < segment.numel(); begin += kClippedAtOnce) {
    const at::Tensor part = segment.narrow(
        0, begin, std::min(kClippedAtOnce, segment.numel() - begin));
    part.copy_(part.to(at::kFloat).mul_(factor));
  }
}

}  // namespace

absl::Status ClampGradients(const Flats& flats, double bound,
                            bool keep_infinite, Gradients* gradients) {
  TESSERA_CHECK(bound > 0) << bound;
  return ChangeOwned("gradient clipping", flats, nullptr, gradients,
                     [&](const GradientParts& parts) {
                       for (const GradientPart& part : parts) {
                         Clamp(part.values, bound, keep_infinite);
                       }
                     });
}

void ClampComing(const FlatParameter& flat, const FlatGradient& gradient,
                 double bound) {
  TESSERA_CHECK(bound > 0) << bound;
  const std::vector<bool> expected = gradient.expected();
  const at::Tensor coming = gradient.coming();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Range mine = Intersect(flat.parameters()[i].range, flat.owned());
    if (!expected[i] || mine.empty()) continue;
    Clamp(coming.narrow(0, mine.begin - flat.owned().begin, mine.numel()),
          bound, /*keep_infinite=*/false);
  }
}

absl::Status MultiplyGradients(const Flats& flats,
                               const std::vector<double>& factors,
                               const std::vector<int>& set_of,
                               Gradients* gradients) {
  const auto factor_of = [&](const FlatParameter::Parameter& p) {
    return factors[static_cast<size_t>(set_of[static_cast<size_t>(p.index)])];
  };
  return ChangeOwned(
      "gradient clipping", flats,
      [&](const FlatParameter::Parameter& p) { return factor_of(p) != 1; },
      gradients,
      [&](const GradientParts& parts) {
        for (const GradientPart& part : parts) {
          Multiply(part.values, factor_of(part.parameter));
        }
      });
}

}  // namespace tessera
