#include "parallel/pipeline/linear_partition.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace tessera {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// sums[i]: the cost of the first i. A range's cost is a difference of two of
// these wherever it is needed, so that the same range has the same cost.
std::vector<double> SumsOf(absl::Span<const double> costs) {
  std::vector<double> sums(costs.size() + 1, 0);
  for (size_t i = 0; i < costs.size(); ++i) sums[i + 1] = sums[i] + costs[i];
  return sums;
}

// Returns the cost of the most expensive range of the best division.
double LeastMost(const std::vector<double>& sums, size_t parts) {
  const size_t n = sums.size() - 1;
  std::vector<double> least = sums;  // of the first i, with one range
  for (size_t part = 2; part <= parts; ++part) {
    std::vector<double> next(n + 1, kInfinite);
    for (size_t i = part; i <= n; ++i) {
      for (size_t j = i - 1; j >= part - 1; --j) {
        const double cost = sums[i] - sums[j];
        if (cost >= next[i]) break;
        next[i] = std::min(next[i], std::max(least[j], cost));
      }
    }
    least = std::move(next);
  }
  return least[n];
}

}  // namespace

std::vector<size_t> LinearPartition(absl::Span<const double> costs, int parts) {
  TESSERA_CHECK(parts >= 1 && static_cast<size_t>(parts) <= costs.size())
      << costs.size() << " in " << parts;
  const size_t n = costs.size(), ranges = static_cast<size_t>(parts);
  const std::vector<double> sums = SumsOf(costs);
  const double most = LeastMost(sums, ranges);
  // squares[i]: the least sum of squares of the first i; begins[k][i]: where
  // the last of its k + 1 ranges begins then.
  std::vector<double> squares(n + 1, kInfinite);
  squares[0] = 0;
  std::vector<std::vector<size_t>> begins(ranges, std::vector<size_t>(n + 1));
  for (size_t part = 0; part < ranges; ++part) {
    std::vector<double> next(n + 1, kInfinite);
    for (size_t i = part + 1; i <= n; ++i) {
      for (size_t j = i; j-- > part;) {
        const double cost = sums[i] - sums[j];
        if (cost > most) break;
        const double sum = squares[j] + cost * cost;
        if (sum > next[i] || sum == kInfinite) continue;
        next[i] = sum;
        begins[part][i] = j;
      }
    }
    squares = std::move(next);
  }
  std::vector<size_t> found(ranges);
  size_t end = n;
  for (size_t part = ranges; part-- > 0;) {
    end = found[part] = begins[part][end];
  }
  return found;
}

}  // namespace tessera
