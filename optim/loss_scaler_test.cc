#include "optim/schedule/loss_scaler.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

LossScaler Make(const LossScalerOptions& options) {
  absl::StatusOr<LossScaler> scaler = LossScaler::Create(options);
  EXPECT_THAT(scaler, IsOk());
  return *scaler;
}

// The scales after each step of `steps`: '!' overflows, '.' does not.
std::vector<double> Scales(LossScaler* scaler, const std::string& steps) {
  std::vector<double> scales;
  for (const char step : steps) {
    TESSERA_EXPECT_OK(scaler->Update(step == '!'));
    scales.push_back(scaler->scale());
  }
  return scales;
}
std::vector<double> Scales(const LossScalerOptions& options,
                           const std::string& steps) {
  LossScaler scaler = Make(options);
  return Scales(&scaler, steps);
}

TEST(LossScaler, DefaultsAreDeepSpeeds) {
  LossScaler scaler = Make({});
  EXPECT_TRUE(scaler.dynamic());
  EXPECT_EQ(scaler.scale(), 65536);
  Scales(&scaler, std::string(999, '.'));
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_THAT(Scales(&scaler, ".!!"), ElementsAre(131072, 131072, 65536));
  EXPECT_EQ(scaler.skipped_steps(), 2);
}

TEST(LossScaler, NoOverflowDoublesAfterEveryWindow) {
  EXPECT_THAT(Scales({.initial_scale_power = 8, .window = 2}, "......"),
              ElementsAre(256, 512, 512, 1024, 1024, 2048));
  EXPECT_THAT(Scales({.initial_scale_power = 0, .window = 1}, "..."),
              ElementsAre(2, 4, 8));
}

TEST(LossScaler, OnlyOverflowsHalveDownToTheMinimum) {
  LossScaler scaler = Make({.initial_scale_power = 3, .hysteresis = 1});
  EXPECT_THAT(Scales(&scaler, "!!!"), ElementsAre(4, 2, 1));
  EXPECT_THAT(scaler.Update(true),
              StatusIs(absl::StatusCode::kOutOfRange,
                       AllOf(HasSubstr("fp16.min_loss_scale, 1"),
                             HasSubstr("4 skipped steps"),
                             HasSubstr("lower the learning rate"))));
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ(scaler.skipped_steps(), 4);
}

TEST(LossScaler, AnErrorLeavesTheWindow) {
  LossScaler scaler =
      Make({.initial_scale_power = 0, .window = 3, .hysteresis = 1});
  Scales(&scaler, "..");
  EXPECT_FALSE(scaler.Update(true).ok());
  EXPECT_THAT(Scales(&scaler, "."), ElementsAre(2));
}

TEST(LossScaler, TheMinimumNeedNotBeAPowerOfTwo) {
  EXPECT_THAT(Scales({.initial_scale_power = 3,
                      .window = 1,
                      .hysteresis = 1,
                      .min_scale = 3},
                     "!!."),
              ElementsAre(4, 3, 6));
}

TEST(LossScaler, SomeOverflows) {
  const LossScalerOptions options = {
      .initial_scale_power = 8, .window = 2, .hysteresis = 1};
  // An overflow starts the window anew.
  EXPECT_THAT(Scales(options, "!!...!"),
              ElementsAre(128, 64, 64, 128, 128, 64));
  EXPECT_THAT(Scales(options, ".!..!.!"),
              ElementsAre(256, 128, 128, 256, 128, 128, 64));
}

TEST(LossScaler, HeadersPicture) {
  EXPECT_THAT(Scales({.initial_scale_power = 3, .window = 2, .hysteresis = 2},
                     "..!!!..!"),
              ElementsAre(8, 16, 16, 8, 4, 4, 8, 8));
}

TEST(LossScaler, HysteresisDelaysUntilTheNextDoubling) {
  const LossScalerOptions options = {
      .initial_scale_power = 4, .window = 3, .hysteresis = 2};
  // Once spent it stays so; an overflow that it hides starts the window anew.
  EXPECT_THAT(Scales(options, "!!!.!"), ElementsAre(16, 8, 4, 4, 2));
  EXPECT_THAT(Scales(options, "..!..!"), ElementsAre(16, 16, 16, 16, 16, 8));
  EXPECT_THAT(Scales(options, "!!...!!"), ElementsAre(16, 8, 8, 8, 16, 16, 8));
  EXPECT_THAT(
      Scales({.initial_scale_power = 4, .window = 9, .hysteresis = 3}, "!!.!!"),
      ElementsAre(16, 16, 16, 8, 4));
}

TEST(LossScaler, ConsecutiveHysteresisIsRefilledByACleanStep) {
  const LossScalerOptions options = {.initial_scale_power = 4,
                                     .window = 3,
                                     .hysteresis = 2,
                                     .consecutive_hysteresis = true};
  EXPECT_THAT(Scales(options, "!.!.!!.!!"),
              ElementsAre(16, 16, 16, 16, 16, 8, 8, 8, 4));
}

TEST(LossScaler, HysteresisDelaysTheErrorToo) {
  LossScaler scaler = Make({.initial_scale_power = 0});
  TESSERA_EXPECT_OK(scaler.Update(true));
  EXPECT_FALSE(scaler.Update(true).ok());
}

TEST(LossScaler, StaticScaleStays) {
  LossScaler scaler = Make({.static_scale = 1000.5, .window = 1});
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_THAT(Scales(&scaler, ".!!!."),
              ElementsAre(1000.5, 1000.5, 1000.5, 1000.5, 1000.5));
  EXPECT_EQ(scaler.skipped_steps(), 3);
}

TEST(LossScaler, EndsAtTheGreatestPowerOfTwoOfAFloat) {
  EXPECT_THAT(Scales({.initial_scale_power = 126, .window = 1}, "..."),
              ElementsAre(0x1p127, 0x1p127, 0x1p127));
}

TEST(LossScaler, GoesOnFromASavedState) {
  const LossScalerOptions options = {
      .initial_scale_power = 6, .window = 3, .hysteresis = 3};
  const std::string steps = "!.!.!..!...!.!!....!!!..";
  const std::vector<double> expected = Scales(options, steps);
  for (size_t cut = 0; cut <= steps.size(); ++cut) {
    LossScaler first = Make(options), second = Make(options);
    std::vector<double> scales = Scales(&first, steps.substr(0, cut));
    TESSERA_EXPECT_OK(second.Restore(first.state()));
    for (double scale : Scales(&second, steps.substr(cut))) {
      scales.push_back(scale);
    }
    EXPECT_EQ(scales, expected) << "cut at " << cut;
    EXPECT_EQ(second.skipped_steps(), 10);
  }
}

TEST(LossScaler, OtherOptionsTakeASavedState) {
  const LossScalerState state = {
      .scale = 4, .clean_steps = 7, .hysteresis_left = 3, .skipped_steps = 5};
  LossScaler scaler = Make({.window = 2, .hysteresis = 2, .min_scale = 8});
  TESSERA_ASSERT_OK(scaler.Restore(state));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(scaler.state().hysteresis_left, 2);
  EXPECT_THAT(Scales(&scaler, ".."), ElementsAre(16, 16));

  LossScaler fixed = Make({.static_scale = 128});
  TESSERA_ASSERT_OK(fixed.Restore(state));
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_EQ(fixed.skipped_steps(), 5);
}

TEST(LossScaler, RefusesDamagedStates) {
  LossScaler scaler = Make({});
  const auto damage = [&](const char* field, auto change) {
    LossScalerState state = scaler.state();
    change(&state);
    EXPECT_THAT(scaler.Restore(state),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(field)));
    EXPECT_EQ(scaler.scale(), 65536);
  };
  for (const double scale : {0.0, -2.0, 0x1p128, kInfinity, std::nan("")}) {
    damage("scale", [&](LossScalerState* s) { s->scale = scale; });
  }
  damage("clean_steps", [](LossScalerState* s) { s->clean_steps = -1; });
  damage("hysteresis_left", [](LossScalerState* s) { s->hysteresis_left = 0; });
  damage("skipped_steps", [](LossScalerState* s) { s->skipped_steps = -1; });
}

TEST(LossScaler, RefusesOptionsThatFindNoScale) {
  const auto refused = [](const char* option, LossScalerOptions options) {
    EXPECT_THAT(LossScaler::Create(options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(std::string("fp16.") + option)));
  };
  for (const double scale : {-1.0, 0x1p128, kInfinity, std::nan("")}) {
    refused("loss_scale: ", {.static_scale = scale});
    refused("min_loss_scale", {.min_scale = scale});
  }
  refused("min_loss_scale", {.min_scale = 0});
  refused("initial_scale_power", {.initial_scale_power = -1});
  refused("initial_scale_power", {.initial_scale_power = 128});
  refused("initial_scale_power", {.min_scale = 65537});
  refused("loss_scale_window", {.window = 0});
  refused("hysteresis", {.hysteresis = 0});
  // Not read with a static scale.
  Make({.static_scale = 2, .window = 0, .hysteresis = 0, .min_scale = 0});
}

}  // namespace
}  // namespace tessera
