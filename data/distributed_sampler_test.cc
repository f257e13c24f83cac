#include "data/distributed_sampler.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

DistributedSampler Make(const DistributedSamplerOptions& options) {
  absl::StatusOr<DistributedSampler> sampler =
      DistributedSampler::Create(options);
  TESSERA_EXPECT_OK(sampler);
  return *std::move(sampler);
}

DistributedSamplerOptions Options(int64_t num_samples, int rank = 0,
                                  int world_size = 1) {
  DistributedSamplerOptions options;
  options.num_samples = num_samples;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

std::vector<int64_t> Indices(const DistributedSampler& sampler) {
  return {sampler.indices().begin(), sampler.indices().end()};
}

// The indices of all ranks in the order in which a job takes them: rank 0's
// first, rank 1's first, ..., rank 0's second, ...
std::vector<int64_t> Interleaved(DistributedSamplerOptions options,
                                 int64_t epoch = 0) {
  std::vector<std::vector<int64_t>> ranks;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    DistributedSampler sampler = Make(options);
    sampler.SetEpoch(epoch);
    ranks.push_back(Indices(sampler));
    EXPECT_EQ(ranks.back().size(), ranks.front().size());
  }
  std::vector<int64_t> all;
  for (size_t i = 0; i < ranks[0].size(); ++i) {
    for (const std::vector<int64_t>& rank : ranks) all.push_back(rank[i]);
  }
  return all;
}

std::vector<int64_t> Iota(int64_t count) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// A change of these values changes every training run, see Note [Shuffle].
TEST(DistributedSampler, KnownOrders) {
  DistributedSampler sampler = Make(Options(8));
  EXPECT_THAT(Indices(sampler), ElementsAre(1, 2, 6, 5, 4, 0, 3, 7));
  sampler.SetEpoch(1);
  EXPECT_THAT(Indices(sampler), ElementsAre(2, 7, 4, 1, 6, 5, 0, 3));
  DistributedSamplerOptions seeded = Options(8);
  seeded.seed = 1;
  EXPECT_THAT(Indices(Make(seeded)), ElementsAre(7, 3, 1, 0, 4, 6, 2, 5));
}

TEST(DistributedSampler, UnshuffledTakesEveryWth) {
  DistributedSamplerOptions options = Options(5, 0, 2);
  options.shuffle = false;
  EXPECT_THAT(Indices(Make(options)), ElementsAre(0, 2, 4));
  options.rank = 1;
  EXPECT_THAT(Indices(Make(options)), ElementsAre(1, 3, 0));
  options.drop_last = true;
  EXPECT_THAT(Indices(Make(options)), ElementsAre(1, 3));
}

struct Shape {
  int64_t num_samples;
  int world_size;
};

class SamplerShapes : public ::testing::TestWithParam<Shape> {
 protected:
  DistributedSamplerOptions options() const {
    return Options(GetParam().num_samples, 0, GetParam().world_size);
  }
};

TEST_P(SamplerShapes, RanksCoverAllSamplesAndPadByWrapping) {
  const int64_t num_samples = GetParam().num_samples;
  const int64_t world_size = GetParam().world_size;
  for (const int64_t epoch : {0, 1, 2}) {
    const std::vector<int64_t> all = Interleaved(options(), epoch);
    const int64_t rounded =
        (num_samples + world_size - 1) / world_size * world_size;
    ASSERT_EQ(static_cast<int64_t>(all.size()), rounded);
    EXPECT_THAT(std::vector<int64_t>(all.begin(), all.begin() + num_samples),
                ::testing::UnorderedElementsAreArray(Iota(num_samples)));
    for (int64_t i = num_samples; i < rounded; ++i) {
      EXPECT_EQ(all[i], all[i % num_samples]) << i;
    }
  }
}

TEST_P(SamplerShapes, DropLastCutsTheSameOrder) {
  DistributedSamplerOptions cut = options();
  cut.drop_last = true;
  if (cut.num_samples < cut.world_size) {
    EXPECT_THAT(DistributedSampler::Create(cut),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("drop_last drops them all")));
    return;
  }
  const std::vector<int64_t> padded = Interleaved(options());
  const std::vector<int64_t> dropped = Interleaved(cut);
  ASSERT_EQ(static_cast<int64_t>(dropped.size()),
            cut.num_samples / cut.world_size * cut.world_size);
  EXPECT_TRUE(std::equal(dropped.begin(), dropped.end(), padded.begin()));
}

// The samples of a job of W ranks, in order, are those of one rank.
TEST_P(SamplerShapes, OrderDoesNotDependOnWorldSize) {
  std::vector<int64_t> all = Interleaved(options());
  all.resize(static_cast<size_t>(GetParam().num_samples));
  EXPECT_EQ(all, Interleaved(Options(GetParam().num_samples)));
}

// Stopping anywhere and going on gives the samples of a run without a stop.
TEST_P(SamplerShapes, SeekGoesOnWhereStateWasTaken) {
  DistributedSamplerOptions mine = options();
  mine.rank = mine.world_size - 1;
  DistributedSampler straight = Make(mine);
  const int64_t count = 2 * straight.samples_per_rank() + 1;
  const std::vector<int64_t> expected = straight.NextBatch(count);
  DistributedSampler first = Make(mine);
  for (int64_t taken = 0; taken < count; ++taken) {
    DistributedSampler resumed = Make(mine);
    resumed.NextBatch(3);  // wherever it was before
    TESSERA_ASSERT_OK(resumed.Seek(first.state()));
    EXPECT_EQ(resumed.NextBatch(count - taken),
              std::vector<int64_t>(expected.begin() + taken, expected.end()))
        << "after " << taken;
    first.Next();
  }
}

// Four ranks go on where two stopped, and take the samples that they would
// have.
TEST(DistributedSampler, OtherNumbersOfRanksGoOn) {
  constexpr int64_t kSamples = 23, kBatch = 8;
  const auto global_batch = [](std::vector<DistributedSampler>& samplers) {
    std::set<int64_t> batch;
    for (DistributedSampler& sampler : samplers) {
      const auto ranks = static_cast<int64_t>(samplers.size());
      for (int64_t i : sampler.NextBatch(kBatch / ranks)) batch.insert(i);
    }
    return batch;
  };
  const auto make = [](int world_size) {
    std::vector<DistributedSampler> samplers;
    for (int r = 0; r < world_size; ++r) {
      samplers.push_back(Make(Options(kSamples, r, world_size)));
    }
    return samplers;
  };
  for (int world_size : {1, 4, 8}) {
    std::vector<DistributedSampler> saved = make(2);
    for (int batches = 0; batches < 2; ++batches) {
      std::vector<DistributedSampler> loaded = make(world_size);
      for (DistributedSampler& sampler : loaded) {
        TESSERA_ASSERT_OK(sampler.Seek(saved[0].state()));
      }
      EXPECT_EQ(global_batch(loaded), global_batch(saved)) << world_size;
    }
  }
}

// Wherever an epoch is left, other ranks take the rest of it in order, each
// sample once, and as many again as their last round lacks.
TEST(DistributedSampler, AnyNumberOfRanksTakesWhatIsLeft) {
  constexpr int64_t kSamples = 13;
  const std::vector<int64_t> order = Indices(Make(Options(kSamples)));
  const auto rest = [&](const SamplerState& state, int world_size,
                        bool drop_last) {
    std::vector<DistributedSampler> samplers;
    for (int r = 0; r < world_size; ++r) {
      DistributedSamplerOptions options = Options(kSamples, r, world_size);
      options.drop_last = drop_last;
      samplers.push_back(Make(options));
      TESSERA_EXPECT_OK(samplers.back().Seek(state));
    }
    std::vector<int64_t> taken;
    while (samplers[0].state().epoch == state.epoch) {
      const int64_t at = samplers[0].state().position;
      EXPECT_EQ(at, state.position + static_cast<int64_t>(taken.size()));
      for (DistributedSampler& sampler : samplers) {
        taken.push_back(sampler.Next());
      }
    }
    return taken;
  };
  for (int64_t position = 0; position < kSamples; ++position) {
    for (int world_size = 1; world_size <= 5; ++world_size) {
      const int64_t left = kSamples - position;
      const int64_t whole = left / world_size * world_size;
      const int64_t full = whole < left ? whole + world_size : left;
      std::vector<int64_t> expected;
      for (int64_t i = 0; i < full; ++i) {
        expected.push_back(
            order[static_cast<size_t>((position + i) % kSamples)]);
      }
      EXPECT_EQ(rest({0, position}, world_size, false), expected);
      expected.resize(static_cast<size_t>(whole));
      EXPECT_EQ(rest({0, position}, world_size, true), expected);
    }
  }
}

std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (const int world_size : {1, 2, 3, 4, 7}) {
    std::set<int64_t> sizes = {
        1, world_size - 1, world_size, world_size + 1, 2 * world_size + 1, 23};
    sizes.erase(0);
    for (const int64_t size : sizes) shapes.push_back({size, world_size});
  }
  return shapes;
}
INSTANTIATE_TEST_SUITE_P(All, SamplerShapes, ::testing::ValuesIn(AllShapes()),
                         [](const ::testing::TestParamInfo<Shape>& info) {
                           return absl::StrCat("Samples",
                                               info.param.num_samples, "World",
                                               info.param.world_size);
                         });

TEST(DistributedSampler, NextRunsOverEpochs) {
  DistributedSampler sampler = Make(Options(5, 1, 2));
  std::vector<int64_t> expected;
  for (const int64_t epoch : {0, 1, 2}) {
    sampler.SetEpoch(epoch);
    const std::vector<int64_t> indices = Indices(sampler);
    expected.insert(expected.end(), indices.begin(), indices.end());
  }
  sampler.SetEpoch(0);
  EXPECT_EQ(sampler.NextBatch(9), expected);
  EXPECT_EQ(sampler.state(), (SamplerState{3, 0}));
  sampler.Next();
  EXPECT_EQ(sampler.state(), (SamplerState{3, 2}));
}

TEST(DistributedSampler, SeedAndEpochChangeTheOrder) {
  std::set<std::vector<int64_t>> orders;
  for (const uint64_t seed : {0, 1, 2, 3}) {
    DistributedSamplerOptions options = Options(20);
    options.seed = seed;
    DistributedSampler sampler = Make(options);
    for (const int64_t epoch : {0, 1, 2, 3}) {
      sampler.SetEpoch(epoch);
      EXPECT_TRUE(orders.insert(Indices(sampler)).second) << seed << epoch;
    }
  }
}

TEST(DistributedSampler, SetEpochRestartsTheEpoch) {
  DistributedSampler sampler = Make(Options(7));
  const std::vector<int64_t> first = sampler.NextBatch(4);
  sampler.SetEpoch(0);
  EXPECT_EQ(sampler.NextBatch(4), first);
}

// All 24 orders of 4 samples, over 24000 epochs: each is expected 1000 times
// with a standard deviation of sqrt(24000 * 1/24 * 23/24) = 31; 6 of them is
// beyond chance. The seed is fixed, so this passes always or never.
TEST(DistributedSampler, AllOrdersAreEquallyLikely) {
  std::map<std::vector<int64_t>, int> counts;
  DistributedSampler sampler = Make(Options(4));
  for (int64_t epoch = 0; epoch < 24000; ++epoch) {
    sampler.SetEpoch(epoch);
    ++counts[Indices(sampler)];
  }
  EXPECT_EQ(counts.size(), 24u);
  for (const auto& [order, count] : counts) {
    EXPECT_NEAR(count, 1000, 6 * 31) << order[0] << order[1] << order[2];
  }
}

TEST(DistributedSampler, BadOptionsAreRefused) {
  EXPECT_THAT(DistributedSampler::Create(Options(0)),
              StatusIs(StatusCode::kInvalidArgument,
                       "sampler: expected at least 1 sample, got 0"));
  EXPECT_THAT(DistributedSampler::Create(Options(3, 2, 2)),
              StatusIs(StatusCode::kInvalidArgument,
                       "sampler: expected a rank of 0 to world size - 1, got 2 "
                       "of 2"));
  EXPECT_THAT(DistributedSampler::Create(Options(3, -1, 2)),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got -1 of 2")));
  EXPECT_THAT(DistributedSampler::Create(Options(3, 0, 0)),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got 0 of 0")));
}

TEST(DistributedSampler, BadStatesAreRefusedAndChangeNothing) {
  DistributedSampler sampler = Make(Options(5, 0, 2));
  sampler.Next();
  EXPECT_THAT(sampler.Seek({1, 5}),
              StatusIs(StatusCode::kInvalidArgument,
                       "sampler: cannot go to sample 5 of epoch 1, there are "
                       "5; is it other data?"));
  EXPECT_FALSE(sampler.Seek({-1, 0}).ok());
  EXPECT_FALSE(sampler.Seek({0, -1}).ok());
  EXPECT_EQ(sampler.state(), (SamplerState{0, 2}));
}

}  // namespace
}  // namespace tessera
