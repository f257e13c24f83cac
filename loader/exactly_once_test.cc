// Every sample of an epoch comes exactly once, however often the number of
// ranks, workers, the batch size and the depth of the queue change in between.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/distributed_order.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/data_loader.h"

namespace tessera {
namespace {

// Stretch is a part of a training: so many ranks take so many batches each.
struct Stretch {
  int world_size = 1;
  int workers = 0;
  int prefetch = 0;
  int64_t batch_size = 1;
  int64_t batches = 0;
};

struct Training {
  int64_t samples = 1;
  bool shuffle = true;
  EpochEnd end = EpochEnd::kContinue;
  std::vector<Stretch> stretches;
};

std::string Describe(const Training& training) {
  std::string text = absl::StrCat("N=", training.samples,
                                  " end=", static_cast<int>(training.end));
  for (const Stretch& s : training.stretches) {
    absl::StrAppend(&text, " [W=", s.world_size, " workers=", s.workers, "/",
                    s.prefetch, " B=", s.batch_size, " x", s.batches, "]");
  }
  return text;
}

// Seen counts each sample of each epoch, without padding.
using Seen = std::map<int64_t, std::map<int64_t, int>>;

using Ranks = std::vector<std::unique_ptr<DataLoader>>;

Ranks Start(const Training& training, const Stretch& stretch,
            const std::string& state) {
  Ranks ranks;
  for (int rank = 0; rank < stretch.world_size; ++rank) {
    DistributedSamplerOptions sampler;
    sampler.num_samples = training.samples;
    sampler.rank = rank;
    sampler.world_size = stretch.world_size;
    sampler.shuffle = training.shuffle;
    sampler.seed = 3;
    auto order = DistributedOrder::Create(sampler);
    TESSERA_EXPECT_OK(order);
    DataLoaderOptions options;
    options.batch_size = stretch.batch_size;
    options.epoch_end = training.end;
    options.workers = stretch.workers;
    options.prefetch = stretch.prefetch;
    auto loader = DataLoader::Create(
        *std::move(order),
        [](absl::Span<const int64_t>, const BatchContext&) {
          return std::vector<at::Tensor>();
        },
        options);
    TESSERA_EXPECT_OK(loader);
    if (!state.empty()) TESSERA_EXPECT_OK((*loader)->Load(state));
    ranks.push_back(*std::move(loader));
  }
  return ranks;
}

void TakeBatch(const Ranks& ranks, Seen* seen) {
  for (const auto& rank : ranks) {
    const absl::StatusOr<Batch> batch = rank->Next();
    TESSERA_ASSERT_OK(batch);
    for (const Sample& sample : batch->samples) {
      if (!sample.padding) ++(*seen)[sample.epoch][sample.index];
    }
  }
}

// Trains the stretches, then on to the end of an epoch. Returns the epochs that
// are over.
int64_t Train(const Training& training, Seen* seen) {
  std::string state;
  Ranks ranks;
  for (const Stretch& stretch : training.stretches) {
    ranks = Start(training, stretch, state);
    for (int64_t i = 0; i < stretch.batches; ++i) TakeBatch(ranks, seen);
    state = ranks[0]->State();
    for (const auto& rank : ranks) EXPECT_EQ(rank->State(), state);
  }
  const int64_t epoch = ranks[0]->epoch();
  while (ranks[0]->epoch() == epoch) TakeBatch(ranks, seen);
  return epoch + 1;
}

void ExpectExactlyOnce(const Training& training) {
  SCOPED_TRACE(Describe(training));
  Seen seen;
  const int64_t epochs = Train(training, &seen);
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    const std::map<int64_t, int>& samples = seen[epoch];
    ASSERT_EQ(samples.size(), static_cast<size_t>(training.samples))
        << "of epoch " << epoch;
    for (const auto& [index, times] : samples) {
      ASSERT_GE(index, 0);
      ASSERT_LT(index, training.samples);
      ASSERT_EQ(times, 1) << "sample " << index << " of epoch " << epoch;
    }
  }
}

// Two stretches: all pairs of world sizes, at each batch of the first epoch.
TEST(ExactlyOnceTest, FromAnyNumberOfRanksToAny) {
  for (const int64_t samples : {1, 7, 24, 31}) {
    for (int before = 1; before <= 5; ++before) {
      for (int after = 1; after <= 5; ++after) {
        for (const int64_t batch : {1, 2, 5}) {
          const int64_t in_epoch =
              (samples + before * batch - 1) / (before * batch);
          for (int64_t at = 0; at <= in_epoch; ++at) {
            Training training;
            training.samples = samples;
            training.end = at % 2 == 0 ? EpochEnd::kContinue : EpochEnd::kShort;
            training.stretches = {{before, 0, 0, batch, at},
                                  {after, 0, 0, 3, 0}};
            ExpectExactlyOnce(training);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

Training RandomTraining(std::mt19937* random, int most_workers) {
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(*random);
  };
  Training training;
  training.samples = pick(1, 60);
  training.shuffle = pick(0, 3) > 0;
  training.end = pick(0, 1) == 0 ? EpochEnd::kContinue : EpochEnd::kShort;
  const int64_t stretches = pick(1, 4);
  for (int64_t i = 0; i < stretches; ++i) {
    Stretch stretch;
    stretch.world_size = static_cast<int>(pick(1, 5));
    stretch.workers = static_cast<int>(pick(0, most_workers));
    stretch.prefetch = static_cast<int>(pick(0, 9));
    stretch.batch_size = pick(1, 7);
    stretch.batches = pick(0, 9);
    training.stretches.push_back(stretch);
  }
  return training;
}

TEST(ExactlyOnceTest, OverManyChangesWithoutWorkers) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000 && !HasFatalFailure(); ++i) {
    ExpectExactlyOnce(RandomTraining(&random, 0));
  }
}

TEST(ExactlyOnceTest, OverManyChangesOfWorkers) {
  std::mt19937 random(2);
  for (int i = 0; i < 150 && !HasFatalFailure(); ++i) {
    ExpectExactlyOnce(RandomTraining(&random, 3));
  }
}

// EpochEnd::kDrop drops the last samples of the order, fewer than a batch of
// all ranks; all others come once.
TEST(ExactlyOnceTest, OnlyTheEndIsDropped) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    Training training = RandomTraining(&random, 0);
    training.end = EpochEnd::kDrop;
    int64_t most = 1;  // of all ranks
    for (Stretch& stretch : training.stretches) {
      most = std::max(most, stretch.batch_size * stretch.world_size);
    }
    training.samples += most;
    SCOPED_TRACE(Describe(training));
    Seen seen;
    const int64_t epochs = Train(training, &seen);
    DistributedSamplerOptions all;
    all.num_samples = training.samples;
    all.shuffle = training.shuffle;
    all.seed = 3;
    auto order = DistributedSampler::Create(all);
    TESSERA_ASSERT_OK(order);
    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
      order->SetEpoch(epoch);
      const auto taken = static_cast<int64_t>(seen[epoch].size());
      ASSERT_GT(taken, training.samples - most) << "of epoch " << epoch;
      for (int64_t k = 0; k < taken; ++k) {
        const int64_t index = order->indices()[static_cast<size_t>(k)];
        ASSERT_EQ(seen[epoch][index], 1)
            << "sample " << index << " of epoch " << epoch;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
