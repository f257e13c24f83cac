#include "verify/oracle_norm.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kLanes = 8;

// The elements of a storage; nullopt where the parameter has none.
using Elements = std::vector<std::optional<double>>;

Elements ElementsOf(const PlacedGradient& placed) {
  int64_t end = placed.offset + 1;
  for (int64_t d = 0; d < placed.gradient.dim(); ++d) {
    end += (placed.gradient.size(d) - 1) * placed.strides[d];
  }
  at::Tensor values = torch::zeros({end}, torch::kDouble);
  at::Tensor present = torch::zeros({end}, torch::kBool);
  const auto sizes = placed.gradient.sizes();
  values.as_strided(sizes, placed.strides, placed.offset)
      .copy_(placed.gradient);
  present.as_strided(sizes, placed.strides, placed.offset).fill_(true);
  Elements elements(static_cast<size_t>(end));
  for (int64_t i = 0; i < end; ++i) {
    if (present.const_data_ptr<bool>()[i]) {
      elements[i] = values.const_data_ptr<double>()[i];
    }
  }
  return elements;
}

double Power(double value, double p) {
  const double x = std::abs(value);
  if (p == 1) return x;
  if (p == 2) return x * x;
  return std::pow(x, p);
}

double BlockSum(const Elements& elements, size_t first, double p) {
  std::array<double, kLanes> l = {};
  for (size_t i = 0; i < kBlock && first + i < elements.size(); ++i) {
    const std::optional<double>& x = elements[first + i];
    if (x.has_value()) l[i % kLanes] += Power(*x, p);
  }
  return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
}

double MaxNorm(const std::vector<PlacedGradient>& gradients) {
  double norm = 0;
  for (const PlacedGradient& placed : gradients) {
    for (const std::optional<double>& x : ElementsOf(placed)) {
      if (!x.has_value()) continue;
      if (std::isnan(*x)) return *x;
      norm = std::max(norm, std::abs(*x));
    }
  }
  return norm;
}

}  // namespace

// Adds as in Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997:
// `parts` do not overlap, grow in magnitude, and their exact sum is that of all
// values so far.
double ExactSum(const std::vector<double>& values) {
  std::vector<double> parts;
  double plain = 0;
  for (double x : values) {
    plain += x;
    std::vector<double> grown;
    for (double y : parts) {
      if (std::abs(x) < std::abs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) grown.push_back(low);
      x = high;
    }
    grown.push_back(x);
    parts = std::move(grown);
  }
  if (!std::isfinite(plain)) return plain;
  // It adds from the largest part down; the first remainder decides, except in
  // a tie, where the sign of the next part does.
  double sum = 0;
  while (!parts.empty()) {
    const double x = sum, y = parts.back();
    parts.pop_back();
    sum = x + y;
    const double low = y - (sum - x);
    if (low == 0) continue;
    if (!parts.empty() && (low < 0) == (parts.back() < 0)) {
      const double twice = 2 * low, next = sum + twice;
      if (next - sum == twice) sum = next;
    }
    break;
  }
  return sum;
}

double OracleNorm(const std::vector<PlacedGradient>& gradients, double p) {
  if (std::isinf(p)) return MaxNorm(gradients);
  std::vector<double> sums;
  for (const PlacedGradient& placed : gradients) {
    const Elements elements = ElementsOf(placed);
    for (size_t i = 0; i < elements.size(); i += kBlock) {
      sums.push_back(BlockSum(elements, i, p));
    }
  }
  const double sum = ExactSum(sums);
  return p == 2 ? std::sqrt(sum) : std::pow(sum, 1 / p);
}

double OracleClipping(double norm, double max_norm) {
  if (max_norm == 0 || norm + 1e-6 <= max_norm) return 1;
  return std::isnan(norm) ? 1 : max_norm / (norm + 1e-6);
}

at::Tensor OracleAdaptivelyClipped(const PlacedGradient& placed,
                                   const at::Tensor& weights, bool rows,
                                   double divisor, double most, double eps) {
  const at::Tensor clipped = placed.gradient.clone();
  for (int64_t i = 0; i < (rows ? clipped.size(0) : 1); ++i) {
    const auto norm_of = [&](const at::Tensor& t) {
      PlacedGradient row = placed;
      row.gradient = t;
      if (rows) {
        row.gradient = t.select(0, i);
        row.strides.erase(row.strides.begin());
        row.offset = (row.offset + i * placed.strides[0]) % kBlock;
      }
      return row.gradient.numel() == 0 ? 0 : OracleNorm({row}, 2);
    };
    const double limit = most * std::max(norm_of(weights), eps);
    const double norm = norm_of(placed.gradient) * (1 / divisor);
    if (!std::isfinite(norm) || norm <= limit) continue;
    const at::Tensor row = rows ? clipped.select(0, i) : clipped;
    row.mul_(torch::full({}, limit / norm, row.options()));
  }
  return clipped;
}

at::Tensor OracleClamped(const at::Tensor& t, double end) {
  const double greatest = t.scalar_type() == at::kFloat
                              ? std::numeric_limits<float>::max()
                              : std::numeric_limits<double>::max();
  const at::Tensor most = torch::full({}, std::min(end, greatest), t.options());
  const at::Tensor lowered = torch::where(t > most, most, t);
  return torch::where(lowered < -most, -most, lowered);
}

}  // namespace tessera
