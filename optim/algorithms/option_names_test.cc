#include "optim/algorithms/option_names.h"

#include <algorithm>
#include <cmath>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

OptimizerOptions Of(Algorithm algorithm) {
  OptimizerOptions options;
  options.algorithm = algorithm;
  return options;
}

TEST(OptionNamesTest, SetsWhatTheAlgorithmHas) {
  for (const Algorithm algorithm :
       {Algorithm::kAdamW, Algorithm::kAdam, Algorithm::kSgd,
        Algorithm::kAdagrad, Algorithm::kRmsProp, Algorithm::kLion,
        Algorithm::kScheduleFree}) {
    for (const std::string& name : OptionNames(algorithm)) {
      OptimizerOptions options = Of(algorithm);
      options.momentum = 0.5;  // there is one, for nesterov
      options.ema_decay = 0.5;
      const double before = OptionOf(name, options).value();
      if (name == "amsgrad" || name == "centered") continue;  // other states
      const double value = before == 1          ? 0
                           : name == "nesterov" ? 1
                           : name == "maximize" ? 1
                                                : 0.25;
      TESSERA_ASSERT_OK(SetOption(name, value, &options));
      EXPECT_EQ(OptionOf(name, options).value(), value) << name;
    }
  }
}

TEST(OptionNamesTest, SaysWhatItHasInstead) {
  OptimizerOptions options;
  EXPECT_THAT(SetOption("momentum", 0.9, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("option 'momentum': AdamW has no such; it "
                                 "has lr, weight_decay, ")));
  EXPECT_THAT(SetOption("beta3", 0.9, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("did you mean 'beta1'?")));
}

TEST(OptionNamesTest, RefusesWhatIsOutOfRange) {
  OptimizerOptions options;
  EXPECT_THAT(SetOption("lr", std::nan(""), &options),
              StatusIs(StatusCode::kInvalidArgument,
                       "option 'lr': expected a finite number of at least 0, "
                       "got nan"));
  EXPECT_THAT(SetOption("eps", -1e-8, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       "option 'eps': expected a finite number above 0, got "
                       "-1e-08"));
  EXPECT_THAT(SetOption("beta2", 1, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       "option 'beta2': expected a finite number of at least 0 "
                       "and below 1, got 1"));
  EXPECT_THAT(SetOption("maximize", 2, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       "option 'maximize': expected 0 or 1, got 2"));
  EXPECT_TRUE(options == OptimizerOptions());
}

// Its average is found by 1 / beta1, and is the only one.
TEST(OptionNamesTest, AScheduleFreeBeta1IsAbove0) {
  OptimizerOptions options = Of(Algorithm::kScheduleFree);
  EXPECT_THAT(SetOption("beta1", 0, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       "option 'beta1': expected a finite number above 0 and "
                       "below 1, got 0"));
  EXPECT_THAT(SetOption("ema_decay", 0.5, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("AdamWScheduleFree has no such")));
  TESSERA_EXPECT_OK(SetOption("beta2", 0, &options));
}

// torch::optim::AdamW's operators are those of plain AdamW.
TEST(OptionNamesTest, RefusesWhatLibtorchExactDoesNotDo) {
  OptimizerOptions options;
  options.libtorch_exact = true;
  EXPECT_THAT(SetOption("maximize", 1, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("no maximize with precision.libtorch_exact")));
  EXPECT_THAT(SetOption("bias_correction", 0, &options),
              StatusIs(StatusCode::kInvalidArgument));
  TESSERA_EXPECT_OK(SetOption("lr", 0.5, &options));
  options.libtorch_exact = false;
  options.libtorch_fused = true;
  EXPECT_THAT(SetOption("bias_correction", 0, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("with precision.libtorch_fused")));
  TESSERA_EXPECT_OK(SetOption("maximize", 1, &options));
}

// In either order: nesterov goes with a momentum and no dampening.
TEST(OptionNamesTest, SetsTogetherWhatFitsTogether) {
  const OptionValues damped = {{"dampening", 0.5}, {"nesterov", 0}};
  const OptionValues nesterov = {{"nesterov", 1}, {"dampening", 0}};
  OptimizerOptions options = Of(Algorithm::kSgd);
  options.momentum = 0.9;
  options.nesterov = true;
  for (OptionValues values : {damped, nesterov, damped, nesterov}) {
    TESSERA_EXPECT_OK(SetOptions(values, &options));
    std::reverse(values.begin(), values.end());
    TESSERA_EXPECT_OK(SetOptions(values, &options));
  }
  const OptimizerOptions before = options;
  EXPECT_THAT(SetOptions({{"lr", 1}, {"dampening", 0.5}}, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("no dampening with it")));
  EXPECT_TRUE(options == before);
}

TEST(OptionNamesTest, RefusesOtherStates) {
  OptimizerOptions options = Of(Algorithm::kSgd);
  EXPECT_THAT(SetOption("momentum", 0.9, &options),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("SGD keeps other states than before")));
  EXPECT_THAT(SetOption("nesterov", 1, &options),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("expected a momentum above 0")));
}

}  // namespace
}  // namespace tessera
