// The rates of configurations, to the bit those that PyTorch 2.11 and DeepSpeed
// 0.19.8 give for the same parameters: testdata/rates.txt, made by the script
// beside it. And what goes beyond them: the scaling with the batch, and rates
// of steps asked for in any order.
#include "engine/build/rate_settings.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "gtest/gtest.h"
#include "optim/schedule/plateau.h"

namespace tessera {
namespace {

// One case of the table.
struct Case {
  std::string scheduler;  // JSON
  std::map<std::string, std::vector<double>> numbers;

  double lr() const { return numbers.at("lr")[0]; }
  const std::vector<double>& Of(const std::string& name) const {
    static const auto* const none = new std::vector<double>;
    const auto it = numbers.find(name);
    return it == numbers.end() ? *none : it->second;
  }
};

std::vector<double> NumbersOf(absl::string_view text) {
  std::vector<double> numbers;
  for (const std::string& word :
       std::vector<std::string>(absl::StrSplit(text, ' '))) {
    numbers.push_back(word == "~" ? numbers.back()
                                  : std::strtod(word.c_str(), nullptr));
  }
  return numbers;
}

std::vector<Case> Cases() {
  const absl::StatusOr<std::string> text =
      ReadWholeFile("engine/build/testdata/rates.txt");
  TESSERA_EXPECT_OK(text.status());
  std::vector<Case> cases;
  for (absl::string_view line :
       absl::StrSplit(text.value_or(""), '\n', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (parts.first == "scheduler") {
      cases.push_back({parts.second, {}});
    } else {
      cases.back().numbers[parts.first] = NumbersOf(parts.second);
    }
  }
  return cases;
}

// A configuration of one rank with batches of 8.
proto::Config ConfigOf(absl::string_view scheduler, double lr,
                       absl::string_view more = "") {
  const absl::StatusOr<proto::Config> config = ParseConfig(
      absl::StrCat("{\"train_batch_size\": 8, \"scheduler\": ", scheduler,
                   ", \"optimizer\": {\"type\": \"AdamW\", \"params\": ",
                   absl::StrFormat("{\"lr\": %.17g}}", lr), more, "}"),
      "", 1);
  TESSERA_EXPECT_OK(config.status()) << scheduler;
  if (config.ok()) TESSERA_EXPECT_OK(CheckRunnable(*config)) << scheduler;
  return config.value_or(proto::Config());
}

bool SameBits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Compares `got` with the table's value, bit by bit.
void ExpectSame(double got, double expected, const Case& of, size_t step) {
  EXPECT_TRUE(SameBits(got, expected)) << absl::StrFormat(
      "step %d: %a, expected %a: %s", step, got, expected, of.scheduler);
}

void ExpectBetas(const LrSchedule& schedule, const Case& of, size_t step) {
  const auto betas = schedule.BetasAt(static_cast<int64_t>(step));
  ASSERT_EQ(betas.has_value(), !of.Of("beta1").empty()) << of.scheduler;
  if (!betas.has_value()) return;
  ExpectSame(betas->beta1, of.Of("beta1")[step], of, step);
  ASSERT_EQ(betas->beta2.has_value(), !of.Of("beta2").empty()) << of.scheduler;
  if (betas->beta2.has_value()) {
    ExpectSame(*betas->beta2, of.Of("beta2")[step], of, step);
  }
}

TEST(RateSettingsTest, RatesAreThoseOfTorchAndDeepSpeed) {
  const std::vector<Case> cases = Cases();
  EXPECT_EQ(cases.size(), 152u);
  for (const Case& each : cases) {
    const auto schedule = LrScheduleOf(ConfigOf(each.scheduler, each.lr()));
    ASSERT_NE(schedule, nullptr);
    const std::vector<double>& metrics = each.Of("metrics");
    for (size_t i = 0; i < each.Of("rates").size(); ++i) {
      ExpectSame(schedule->Rate(static_cast<int64_t>(i), each.lr()),
                 each.Of("rates")[i], each, i);
      ExpectBetas(*schedule, each, i);
      if (!metrics.empty()) schedule->plateau()->Report(metrics[i]);
    }
    if (::testing::Test::HasFailure()) break;
  }
}

// A run that resumes asks a new object for a step in the middle, one whose step
// was skipped asks for a step again, and groups have rates of their own.
TEST(RateSettingsTest, RatesDependOnTheStepAndTheBaseAlone) {
  for (const Case& each : Cases()) {
    if (!each.Of("metrics").empty()) continue;
    const proto::Config config = ConfigOf(each.scheduler, each.lr());
    const auto back = LrScheduleOf(config);
    const size_t steps = each.Of("rates").size();
    for (size_t i = steps; i-- > 0;) {
      const auto step = static_cast<int64_t>(i);
      const double expected = each.Of("rates")[i];
      ExpectSame(LrScheduleOf(config)->Rate(step, each.lr()), expected, each,
                 i);
      back->Rate(step, 0.5);
      ExpectSame(back->Rate(step, each.lr()), expected, each, i);
    }
    if (::testing::Test::HasFailure()) break;
  }
}

TEST(RateSettingsTest, LongRunsGoOnFromAMark) {
  const proto::Config config = ConfigOf(
      "{\"type\": \"ExponentialLR\", \"params\": {\"gamma\": 0.9999}}", 0.5);
  std::vector<double> rates = {0.5};
  while (rates.size() < 25000) rates.push_back(rates.back() * 0.9999);
  const auto schedule = LrScheduleOf(config);
  for (int64_t step : {19999, 4096, 4095, 12000, 8192, 8191, 0, 24999, 20481}) {
    EXPECT_EQ(schedule->Rate(step, 0.5), rates[static_cast<size_t>(step)])
        << step;
  }
}

// torch raises an error there.
TEST(RateSettingsTest, AfterOneCycleTheLastRateStays) {
  for (const char* shape : {"cos", "linear"}) {
    const auto schedule = LrScheduleOf(ConfigOf(
        absl::StrCat("{\"type\": \"OneCycleLR\", \"params\": {\"max_lr\": 1, "
                     "\"total_steps\": 20, \"anneal_strategy\": \"",
                     shape, "\"}}"),
        0.1));
    EXPECT_NEAR(schedule->Rate(19, 0.1), 1 / 25.0 / 1e4, 1e-15);
    EXPECT_EQ(schedule->Rate(20, 0.1), schedule->Rate(19, 0.1));
    EXPECT_EQ(schedule->Rate(1000, 0.1), schedule->Rate(19, 0.1));
  }
}

// DeepSpeed's cycles set rates that need not be near the optimizer's.
TEST(RateSettingsTest, AWarmupGoesUpToTheFirstRateOfASchedule) {
  const auto schedule = LrScheduleOf(ConfigOf(
      "{\"type\": \"OneCycle\", \"params\": {\"cycle_min_lr\": 0.5, "
      "\"cycle_max_lr\": 1, \"cycle_first_step_size\": 2}, \"warmup\": "
      "{\"num_steps\": 4, \"start_factor\": 0.5}}",
      0.001));
  const double expected[] = {0.25, 0.3125, 0.375, 0.4375, 0.5, 0.75, 1, 0.75};
  for (int64_t i = 0; i < 8; ++i) {
    EXPECT_DOUBLE_EQ(schedule->Rate(i, 0.001), expected[i]) << i;
  }
  EXPECT_EQ(schedule->BetasAt(0)->beta1, schedule->BetasAt(4)->beta1);
  EXPECT_NE(schedule->BetasAt(4)->beta1, schedule->BetasAt(5)->beta1);
}

TEST(RateSettingsTest, AReductionHoldsForTheWarmupToo) {
  const auto schedule = LrScheduleOf(
      ConfigOf("{\"type\": \"ReduceLROnPlateau\", \"params\": {\"patience\": "
               "0, \"factor\": 0.5}, \"warmup\": {\"num_steps\": 2, "
               "\"start_factor\": 0.5}}",
               1));
  EXPECT_EQ(schedule->Rate(0, 1), 0.5);
  schedule->plateau()->Report(1);
  schedule->plateau()->Report(1);
  EXPECT_EQ(schedule->Rate(0, 1), 0.25);
  EXPECT_EQ(schedule->Rate(2, 1), 0.5);
  EXPECT_EQ(schedule->Rate(2, 4), 2);  // of another group
}

TEST(RateSettingsTest, OthersHaveNoPlateau) {
  EXPECT_EQ(LrScheduleOf(ConfigOf("{\"type\": \"WarmupLR\"}", 1))->plateau(),
            nullptr);
  EXPECT_EQ(LrScheduleOf(ConfigOf("null", 1)), nullptr);
}

TEST(RateSettingsTest, AllRatesAreScaledWithTheBatch) {
  const auto scaling = [](absl::string_view rule, int base) {
    return absl::StrCat(", \"learning_rate_scaling\": {\"rule\": \"", rule,
                        "\", \"base_batch_size\": ", base, "}");
  };
  const auto factor = [&](absl::string_view rule, int base) {
    return RateFactorOf(ConfigOf("null", 1, scaling(rule, base)));
  };
  EXPECT_EQ(factor("linear", 2), 4);
  EXPECT_EQ(factor("sqrt", 2), 2);
  EXPECT_EQ(factor("linear", 32), 0.25);
  EXPECT_EQ(factor("none", 2), 1);
  EXPECT_EQ(RateFactorOf(ConfigOf("null", 1)), 1);
  // A power of two scales each rate exactly, of schedules with rates of their
  // own too.
  for (const Case& each : Cases()) {
    const auto plain = LrScheduleOf(ConfigOf(each.scheduler, each.lr()));
    const auto scaled =
        LrScheduleOf(ConfigOf(each.scheduler, each.lr(), scaling("linear", 2)));
    for (size_t i = 0; i < each.Of("rates").size(); ++i) {
      const auto step = static_cast<int64_t>(i);
      ExpectSame(scaled->Rate(step, 4 * each.lr()),
                 4 * plain->Rate(step, each.lr()), each, i);
      if (each.Of("metrics").empty()) continue;
      plain->plateau()->Report(each.Of("metrics")[i]);
      scaled->plateau()->Report(each.Of("metrics")[i]);
    }
    if (::testing::Test::HasFailure()) break;
  }
}

// What torch does not have: the lowest rate stays.
TEST(RateTest, ACosineThatHolds) {
  const std::string cosine =
      R"({"type": "CosineAnnealingLR", "params": {"T_max": 4, "eta_min": 0.25%s}%s})";
  const auto made = [&](const char* after, const char* warmup) {
    return LrScheduleOf(
        ConfigOf(absl::StrReplaceAll(
                     cosine, {{"%s}%s", absl::StrCat(after, "}", warmup)}}),
                 1));
  };
  const char kHold[] = R"(, "after": "hold")";
  const char kWarmup[] = R"(, "warmup": {"num_steps": 3})";
  const auto torchs = made("", ""), holds = made(kHold, "");
  for (int64_t step = 0; step <= 4; ++step) {
    EXPECT_EQ(holds->Rate(step, 1), torchs->Rate(step, 1));
  }
  for (int64_t step = 5; step <= 12; ++step) {
    EXPECT_EQ(holds->Rate(step, 1), torchs->Rate(4, 1));
  }
  EXPECT_GT(torchs->Rate(5, 1), torchs->Rate(4, 1));
  EXPECT_EQ(made(R"(, "after": "rise")", "")->Rate(5, 1), torchs->Rate(5, 1));
  EXPECT_EQ(made(kHold, kWarmup)->Rate(20, 1), holds->Rate(4, 1));
  EXPECT_EQ(torchs->RisesAfter(), 4);
  EXPECT_EQ(made("", kWarmup)->RisesAfter(), 7);
  EXPECT_EQ(holds->RisesAfter(), std::nullopt);
  EXPECT_EQ(made(kHold, kWarmup)->RisesAfter(), std::nullopt);
}

}  // namespace
}  // namespace tessera
