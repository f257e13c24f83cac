// Rates that DeepSpeed 0.19.8 gives for the same parameters, of the first
// twelve steps, to the bit; the optimizer's own rate is 0.02.
#include "optim/schedule/lr_schedule.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using Type = LrScheduleOptions::Type;

LrScheduleOptions Of(Type type) {
  LrScheduleOptions options;
  options.type = type;
  options.optimizer_lr = 0.02;
  options.warmup_max_lr = 0.02;
  return options;
}

std::vector<double> FirstRates(const LrScheduleOptions& options) {
  std::vector<double> rates;
  for (int done = 0; done < 12; ++done) {
    rates.push_back(LrSchedule(options).Rate(done));
  }
  return rates;
}

TEST(LrSchedule, WarmupLR) {
  LrScheduleOptions o = Of(Type::kWarmup);
  o.warmup_max_lr = 0.01;
  o.warmup_num_steps = 4;
  EXPECT_THAT(FirstRates(o),
              ::testing::ElementsAre(0x0.0p+0, 0x0.0p+0, 0x1.47ae147ae147bp-8,
                                     0x1.03ae2543d4606p-7, 0x1.47ae147ae147bp-7,
                                     0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
                                     0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
                                     0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
                                     0x1.47ae147ae147bp-7));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupLRAgain) {
  LrScheduleOptions o = Of(Type::kWarmup);
  o.warmup_min_lr = 0.001;
  o.warmup_num_steps = 5;
  o.warmup_linear = true;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-10, 0x1.3a92a30553262p-8,
          0x1.19ce075f6fd22p-7, 0x1.9652bd3c36112p-7, 0x1.096bb98c7e282p-6,
          0x1.47ae147ae147bp-6, 0x1.47ae147ae147bp-6, 0x1.47ae147ae147bp-6,
          0x1.47ae147ae147bp-6, 0x1.47ae147ae147bp-6, 0x1.47ae147ae147bp-6));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupDecayLR) {
  LrScheduleOptions o = Of(Type::kWarmupDecay);
  o.total_num_steps = 8;
  o.warmup_max_lr = 0.01;
  o.warmup_num_steps = 3;
  EXPECT_THAT(FirstRates(o),
              ::testing::ElementsAre(0x0.0p+0, 0x0.0p+0, 0x1.9d7c72939ddbep-8,
                                     0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
                                     0x1.0624dd2f1a9fcp-7, 0x1.89374bc6a7efap-8,
                                     0x1.0624dd2f1a9fcp-8, 0x1.0624dd2f1a9fcp-9,
                                     0x0.0p+0, 0x0.0p+0, 0x0.0p+0));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupDecayLRAgain) {
  LrScheduleOptions o = Of(Type::kWarmupDecay);
  o.warmup_max_lr = 0.001;  // DeepSpeed's default
  o.total_num_steps = 7;
  o.warmup_min_lr = 0.002;
  o.warmup_num_steps = 2;
  o.warmup_linear = true;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.0624dd2f1a9fcp-9, 0x1.0624dd2f1a9fcp-9, 0x1.89374bc6a7efap-10,
          0x1.0624dd2f1a9fcp-10, 0x1.3a92a30553262p-10, 0x1.6f0068db8bac8p-10,
          0x1.a36e2eb1c432dp-10, 0x1.d7dbf487fcb92p-10, 0x1.0624dd2f1a9fcp-9,
          0x1.0624dd2f1a9fcp-9, 0x1.0624dd2f1a9fcp-9, 0x1.0624dd2f1a9fcp-9));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupCosineLR) {
  LrScheduleOptions o = Of(Type::kWarmupCosine);
  o.total_num_steps = 8;
  o.warmup_num_steps = 3;
  o.warmup_min_ratio = 0.1;
  o.cos_min_ratio = 0.01;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x0.0p+0, 0x1.0624dd2f1a9fcp-9, 0x1.b5ac6b3707edcp-7,
          0x1.47ae147ae147bp-6, 0x1.28b3c6b748af3p-6, 0x1.af33f15fd27eap-7,
          0x1.cd6be0a16e431p-8, 0x1.12095107e1078p-9, 0x1.a36e2eb1c432dp-13,
          0x1.a36e2eb1c432dp-13, 0x1.a36e2eb1c432dp-13, 0x1.a36e2eb1c432dp-13));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupCosineLRAgain) {
  LrScheduleOptions o = Of(Type::kWarmupCosine);
  o.total_num_steps = 6;
  o.warmup_num_steps = 2;
  o.warmup_linear = true;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x0.0p+0, 0x0.0p+0, 0x1.47ae147ae147bp-7, 0x1.17b279fb4cb3cp-6,
          0x1.47b677f6b1a2ap-7, 0x1.801fefdb27777p-9, 0x1.0c6f7a0b5ed8ep-19,
          0x1.0c6f7a0b5ed8ep-19, 0x1.0c6f7a0b5ed8ep-19, 0x1.0c6f7a0b5ed8ep-19,
          0x1.0c6f7a0b5ed8ep-19, 0x1.0c6f7a0b5ed8ep-19));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, OneCycle) {
  LrScheduleOptions o = Of(Type::kOneCycle);
  o.cycle_min_lr = 0.001;
  o.cycle_max_lr = 0.01;
  o.cycle_first_step_size = 3;
  o.cycle_second_step_size = 2;
  o.decay_lr_rate = 0.5;
  o.decay_step_size = 2;
  o.decay_mom_rate = 0.1;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-8, 0x1.cac083126e978p-8,
          0x1.47ae147ae147ap-7, 0x1.6872b020c49bap-8, 0x1.0624dd2f1a9fcp-10,
          0x1.a36e2eb1c432dp-11, 0x1.5d867c3ece2a5p-11, 0x1.2b97d835d548ep-11,
          0x1.0624dd2f1a9fcp-11, 0x1.d208a5a912e32p-12, 0x1.a36e2eb1c432dp-12));
  std::vector<double> momentum;
  for (int done = 0; done < 12; ++done) {
    const auto betas = LrSchedule(o).BetasAt(done);
    ASSERT_TRUE(betas.has_value());
    EXPECT_EQ(betas->beta2, 0.99);
    momentum.push_back(betas->beta1);
  }
  EXPECT_THAT(
      momentum,
      ::testing::ElementsAre(
          0x1.999999999999ap-1, 0x1.bbbbbbbbbbbbcp-1, 0x1.aaaaaaaaaaaabp-1,
          0x1.999999999999ap-1, 0x1.b333333333334p-1, 0x1.ccccccccccccdp-1,
          0x1.e3d70a3d70a3ep-1, 0x1.fae147ae147afp-1, 0x1.08f5c28f5c28fp+0,
          0x1.147ae147ae148p+0, 0x1.2000000000000p+0, 0x1.2b851eb851eb9p+0));
}

TEST(LrSchedule, OneCycleAgain) {
  LrScheduleOptions o = Of(Type::kOneCycle);
  o.cycle_min_lr = 0.001;
  o.cycle_max_lr = 0.01;
  o.cycle_first_step_size = 4;
  o.cycle_first_stair_count = 2;
  o.cycle_momentum = false;
  o.cycle_second_step_size = 4;
  o.cycle_second_stair_count = 2;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-10, 0x1.6872b020c49bbp-8,
          0x1.6872b020c49bbp-8, 0x1.47ae147ae147cp-7, 0x1.6872b020c49bbp-8,
          0x1.6872b020c49bbp-8, 0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-10,
          0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-10, 0x1.0624dd2f1a9fcp-10));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, LRRangeTest) {
  LrScheduleOptions o = Of(Type::kRangeTest);
  o.range_min_lr = 0.01;
  o.range_step_size = 3;
  o.range_step_rate = 2.0;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.47ae147ae147bp-7, 0x1.1111111111111p-6, 0x1.7e4b17e4b17e4p-6,
          0x1.eb851eb851eb8p-6, 0x1.2c5f92c5f92c6p-5, 0x1.62fc962fc9631p-5,
          0x1.999999999999ap-5, 0x1.d0369d0369d04p-5, 0x1.0369d0369d036p-4,
          0x1.1eb851eb851ecp-4, 0x1.3a06d3a06d3a1p-4, 0x1.5555555555555p-4));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, LRRangeTestAgain) {
  LrScheduleOptions o = Of(Type::kRangeTest);
  o.range_min_lr = 0.01;
  o.range_step_size = 2;
  o.range_step_rate = 2.0;
  o.range_staircase = true;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7, 0x1.eb851eb851eb8p-6,
          0x1.eb851eb851eb8p-6, 0x1.999999999999ap-5, 0x1.999999999999ap-5,
          0x1.1eb851eb851ecp-4, 0x1.1eb851eb851ecp-4, 0x1.70a3d70a3d70ap-4,
          0x1.70a3d70a3d70ap-4, 0x1.c28f5c28f5c29p-4, 0x1.c28f5c28f5c29p-4));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

TEST(LrSchedule, WarmupLRLater) {
  LrScheduleOptions o = Of(Type::kWarmup);
  o.warmup_max_lr = 0.01;
  o.warmup_num_steps = 4;
  o.last_batch_iteration = 2;
  EXPECT_THAT(
      FirstRates(o),
      ::testing::ElementsAre(
          0x1.47ae147ae147bp-6, 0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
          0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
          0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7,
          0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7, 0x1.47ae147ae147bp-7));
  EXPECT_FALSE(LrSchedule(o).BetasAt(3).has_value());
}

}  // namespace
}  // namespace tessera
