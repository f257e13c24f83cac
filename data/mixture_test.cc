#include "data/mixture.h"

#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/index_permutation.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(IndexPermutation, HasEachNumberOnce) {
  for (const int64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097}) {
    for (const uint64_t key : {0, 1, 77}) {
      const IndexPermutation permutation(n, key);
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t value = permutation.At(i);
        ASSERT_GE(value, 0);
        ASSERT_LT(value, n);
        ASSERT_TRUE(seen.insert(value).second) << n << " " << i;
      }
    }
  }
  const IndexPermutation large(int64_t{1} << 62, 1);
  EXPECT_LT(large.At((int64_t{1} << 62) - 1), int64_t{1} << 62);
  EXPECT_NE(large.At(0), large.At(1));
}

// All 120 orders of 5, by 12000 keys: each is expected 100 times with a
// standard deviation of 10; 6 of them is beyond chance. The keys are fixed, so
// this passes always or never.
TEST(IndexPermutation, AllOrdersAreEquallyLikely) {
  std::map<std::vector<int64_t>, int> counts;
  for (uint64_t key = 0; key < 12000; ++key) {
    const IndexPermutation permutation(5, key);
    std::vector<int64_t> order;
    for (int64_t i = 0; i < 5; ++i) order.push_back(permutation.At(i));
    ++counts[order];
  }
  EXPECT_EQ(counts.size(), 120u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 100, 60);
}

// A change of these values changes every run that mixes sources.
TEST(IndexPermutation, KnownOrder) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 8; ++i) {
    order.push_back(IndexPermutation(8, 0).At(i));
  }
  EXPECT_THAT(order, ElementsAre(3, 5, 2, 0, 6, 7, 1, 4));
}

MixtureOptions Options(const std::vector<double>& weights,
                       const std::vector<int64_t>& sizes = {}) {
  MixtureOptions options;
  for (size_t i = 0; i < weights.size(); ++i) {
    options.sources.push_back({sizes.empty() ? 7 : sizes[i], weights[i]});
  }
  return options;
}

Mixture Make(const MixtureOptions& options) {
  absl::StatusOr<Mixture> mixture = Mixture::Create(options);
  TESSERA_EXPECT_OK(mixture);
  return *std::move(mixture);
}

std::vector<int> Sources(const Mixture& mixture, int64_t count) {
  std::vector<int> sources;
  for (int64_t i = 0; i < count; ++i) sources.push_back(mixture.At(i).source);
  return sources;
}

// These turns must not change either.
TEST(Mixture, KnownTurns) {
  EXPECT_THAT(Sources(Make(Options({0.5, 0.3, 0.2})), 12),
              ElementsAre(0, 1, 0, 2, 0, 1, 0, 2, 1, 0, 0, 1));
  EXPECT_THAT(Sources(Make(Options({1})), 3), ElementsAre(0, 0, 0));
  EXPECT_THAT(Sources(Make(Options({3, 1})), 8),
              ElementsAre(0, 0, 1, 0, 0, 0, 1, 0));
}

// Every prefix has of each source its share, less than one more or less.
TEST(Mixture, EveryPrefixHasItsShares) {
  const std::vector<std::vector<double>> cases = {
      {0.5, 0.3, 0.2},
      {0.7, 0.3},
      {1, 1, 1, 1, 1, 1, 1},
      {100, 1, 1, 1},
      {0.9, 0.05, 0.03, 0.02},
      {1, 2, 3, 4, 5, 6, 7, 8, 9},
      {0.31, 0.29, 0.23, 0.11, 0.06},
      {std::sqrt(2), std::sqrt(3), M_PI},
      {1e6, 1, 2},
  };
  for (const std::vector<double>& weights : cases) {
    const Mixture mixture = Make(Options(weights));
    double sum = 0;
    for (const double weight : weights) sum += weight;
    const double bound =
        1 - 1.0 / (2.0 * static_cast<double>(weights.size()) - 2);
    std::vector<int64_t> had(weights.size());
    for (int64_t i = 0; i < 30000; ++i) {
      ++had[static_cast<size_t>(mixture.At(i).source)];
      for (size_t d = 0; d < had.size(); ++d) {
        const double exact = static_cast<double>(i + 1) * weights[d] / sum;
        // 2^-21 of each sample where weights are rounded.
        ASSERT_LE(std::abs(static_cast<double>(had[d]) - exact),
                  bound + 30000.0 / (1 << 21) + 1e-6)
            << "source " << d << " of " << had.size() << " after " << i + 1;
      }
    }
  }
}

TEST(Mixture, SharesAreExactOrRoundedFinely) {
  const Mixture exact = Make(Options({0.7, 0.3}));
  EXPECT_EQ(exact.share(0), 0.7);
  const Mixture rounded = Make(Options({std::sqrt(2), 1}));
  EXPECT_NEAR(rounded.share(0), std::sqrt(2) / (1 + std::sqrt(2)), 0x1p-20);
  EXPECT_EQ(rounded.share(0) + rounded.share(1), 1.0);
}

// Each source is gone through whole before it comes again, each time in another
// order, whatever the others do.
TEST(Mixture, SourcesRepeatByEpochsOfTheirOwn) {
  const Mixture mixture = Make(Options({0.5, 0.3, 0.2}, {10, 3, 50}));
  std::map<std::pair<int, int64_t>, std::vector<int64_t>> epochs;
  for (int64_t i = 0; i < 1000; ++i) {
    const MixedSample sample = mixture.At(i);
    epochs[{sample.source, sample.epoch}].push_back(sample.index);
  }
  const std::vector<int64_t> sizes = {10, 3, 50};
  std::set<std::vector<int64_t>> orders;
  for (const auto& [key, order] : epochs) {
    const int64_t size = sizes[static_cast<size_t>(key.first)];
    ASSERT_EQ(static_cast<int64_t>(order.size()), size);
    EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(),
              order.size());
    orders.insert(order);
  }
  EXPECT_EQ(epochs.size(), 50u + 100u + 4u);
  EXPECT_EQ(orders.size(), 50u + 6u + 4u);  // 3 samples have 6 orders
}

TEST(Mixture, UnshuffledSourcesGoUp) {
  MixtureOptions options = Options({1, 1}, {2, 3});
  options.shuffle = false;
  const Mixture mixture = Make(options);
  std::vector<int64_t> of_first;
  for (int64_t i = 0; i < 8; ++i) {
    if (mixture.At(i).source == 0) of_first.push_back(mixture.At(i).index);
  }
  EXPECT_THAT(of_first, ElementsAre(0, 1, 0, 1));
}

TEST(Mixture, SeedChangesOrdersNotTurns) {
  MixtureOptions options = Options({0.5, 0.5}, {1000, 1000});
  const Mixture a = Make(options);
  options.seed = 1;
  const Mixture b = Make(options);
  EXPECT_EQ(Sources(a, 100), Sources(b, 100));
  int equal = 0;
  for (int64_t i = 0; i < 100; ++i) equal += a.At(i) == b.At(i);
  EXPECT_LT(equal, 10);
}

// With kStop the end is where some source would start over.
TEST(Mixture, StopsWhereTheFirstSourceEnds) {
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{10, 3, 50},
                                            {5, 3, 2},
                                            {1, 9, 9},
                                            {500, 301, 200}}) {
    MixtureOptions options = Options({0.5, 0.3, 0.2}, sizes);
    const Mixture endless = Make(options);
    EXPECT_EQ(endless.num_samples(), Mixture::kEndless);
    int64_t end = 0;
    while (endless.At(end).epoch == 0) ++end;
    options.end = MixtureEnd::kStop;
    const Mixture mixture = Make(options);
    EXPECT_EQ(mixture.num_samples(), end) << sizes[0];
    EXPECT_DEATH(mixture.At(end), absl::StrCat(end, " vs ", end));
  }
}

TEST(Mixture, BadOptionsAreRefused) {
  EXPECT_THAT(Mixture::Create({}),
              StatusIs(StatusCode::kInvalidArgument,
                       "mixture: expected 1 to 256 sources, got 0"));
  EXPECT_THAT(Mixture::Create(Options({1, 1}, {3, 0})),
              StatusIs(StatusCode::kInvalidArgument,
                       "mixture: source 1: expected at least 1 sample, got 0"));
  for (const double weight : {0.0, -1.0, double{NAN}, double{INFINITY}}) {
    EXPECT_THAT(Mixture::Create(Options({weight, 1})),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("source 0: expected a weight above 0")));
  }
  EXPECT_THAT(Mixture::Create(Options({1, 1e-8})),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("source 1: its weight, 1e-08")));
}

}  // namespace
}  // namespace tessera
