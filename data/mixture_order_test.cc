#include "data/mixture_order.h"

#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Mixture Make(MixtureEnd end, uint64_t seed = 0) {
  MixtureOptions options;
  options.sources = {{11, 0.6}, {13, 0.4}};
  options.end = end;
  options.seed = seed;
  absl::StatusOr<Mixture> mixture = Mixture::Create(options);
  TESSERA_EXPECT_OK(mixture);
  return *std::move(mixture);
}

std::unique_ptr<SampleOrder> Order(const Mixture& mixture, int rank,
                                   int world_size) {
  auto order = MixtureOrder::Create(&mixture, rank, world_size);
  TESSERA_EXPECT_OK(order);
  return *std::move(order);
}

std::vector<int64_t> Places(const std::vector<Sample>& samples) {
  std::vector<int64_t> places;
  for (const Sample& sample : samples) places.push_back(sample.index);
  return places;
}

TEST(MixtureOrder, RanksTakeEveryWth) {
  const Mixture mixture = Make(MixtureEnd::kRepeat);
  EXPECT_THAT(Places(Order(mixture, 0, 3)->NextBatch(4)),
              ElementsAre(0, 3, 6, 9));
  EXPECT_THAT(Places(Order(mixture, 2, 3)->NextBatch(2)), ElementsAre(2, 5));
  EXPECT_EQ(Order(mixture, 0, 3)->LeftInEpoch(), SampleOrder::kEndless);
}

// Whatever the numbers of ranks before and after, each place comes once.
TEST(MixtureOrder, AnyNumberOfRanksGoesOn) {
  const Mixture mixture = Make(MixtureEnd::kRepeat);
  for (const int first_world : {1, 2, 3}) {
    for (const int second_world : {1, 4, 5}) {
      std::vector<int64_t> taken;
      std::string state = Order(mixture, 0, 1)->State();
      for (const int world : {first_world, second_world}) {
        std::vector<std::unique_ptr<SampleOrder>> ranks;
        for (int r = 0; r < world; ++r) {
          ranks.push_back(Order(mixture, r, world));
          TESSERA_ASSERT_OK(ranks.back()->Seek(state));
        }
        for (int round = 0; round < 7; ++round) {
          for (auto& rank : ranks) taken.push_back(rank->NextBatch(1)[0].index);
        }
        state = ranks[0]->State();
        for (auto& rank : ranks) EXPECT_EQ(rank->State(), state);
      }
      for (size_t i = 0; i < taken.size(); ++i) {
        EXPECT_EQ(taken[i], static_cast<int64_t>(i));
      }
    }
  }
}

TEST(MixtureOrder, AllRanksEndAnEpochTogether) {
  const Mixture mixture = Make(MixtureEnd::kStop);
  const int64_t whole = mixture.num_samples() / 4;
  ASSERT_NE(mixture.num_samples() % 4, 0);
  for (int rank = 0; rank < 4; ++rank) {
    const auto order = Order(mixture, rank, 4);
    EXPECT_EQ(order->LeftInEpoch(), whole);
    const std::vector<Sample> samples = order->NextBatch(whole + 1);
    EXPECT_EQ(samples[static_cast<size_t>(whole) - 1].epoch, 0);
    EXPECT_EQ(samples.back().epoch, 1);
    EXPECT_EQ(samples.back().index, rank);
    EXPECT_EQ(order->epoch(), 1);
    EXPECT_EQ(order->LeftInEpoch(), whole - 1);
    TESSERA_ASSERT_OK(order->SetEpoch(0));
    EXPECT_EQ(order->LeftInEpoch(), whole);
  }
  // Another number of ranks finds less than a round left.
  const auto one = Order(mixture, 0, 1);
  one->NextBatch(mixture.num_samples() - 1);
  const auto four = Order(mixture, 0, 4);
  TESSERA_ASSERT_OK(four->Seek(one->State()));
  EXPECT_EQ(four->epoch(), 1);
  EXPECT_EQ(four->LeftInEpoch(), whole);
}

TEST(MixtureOrder, WhatCannotBeIsRefused) {
  const Mixture mixture = Make(MixtureEnd::kRepeat);
  EXPECT_THAT(MixtureOrder::Create(&mixture, 2, 2),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got 2 of 2")));
  const Mixture small = Make(MixtureEnd::kStop);
  EXPECT_THAT(MixtureOrder::Create(&small, 0, 100),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("100 ranks")));
  const auto order = Order(mixture, 0, 1);
  order->NextBatch(3);
  const std::string before = order->State();
  EXPECT_THAT(order->Seek("epoch=0"), StatusIs(StatusCode::kDataLoss));
  EXPECT_THAT(order->Seek("epoch=0 position=-1 x"),
              StatusIs(StatusCode::kDataLoss));
  const Mixture other = Make(MixtureEnd::kRepeat, 1);
  EXPECT_THAT(order->Seek(Order(other, 0, 1)->State()),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("other sources, weights")));
  EXPECT_THAT(order->SetEpoch(1), StatusIs(StatusCode::kInvalidArgument,
                                           HasSubstr("its sources repeat")));
  EXPECT_FALSE(order->SetEpoch(-1).ok());
  EXPECT_EQ(order->State(), before);
}

}  // namespace
}  // namespace tessera
