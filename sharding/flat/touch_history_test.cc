#include "sharding/flat/touch_history.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
constexpr int kBorder = TouchHistory::kBorder;
constexpr int kUnknown = TouchHistory::kUnknown;

void Touch(TouchHistory* history, const std::vector<int>& flats) {
  for (int flat : flats) history->Append(flat);
}

std::vector<int> Next(const TouchHistory& history, size_t n) {
  std::vector<int> next;
  for (size_t k = 0; k < n; ++k) next.push_back(history.Expected(k));
  return next;
}

const std::vector<int> kStep = {0, 1, 2, 1, 0, kBorder};

TEST(TouchHistory, KnowsNothingAtFirst) {
  TouchHistory history({1, 1, 1});
  EXPECT_FALSE(history.KnowsNext());
  Touch(&history, {0, 1, 2});
  EXPECT_FALSE(history.KnowsNext());
  EXPECT_FALSE(history.ReusedWithin(1, 100));
}

TEST(TouchHistory, ReplaysTheLastStep) {
  TouchHistory history({1, 1, 1});
  Touch(&history, kStep);
  history.Append(0);
  EXPECT_THAT(Next(history, 5), ElementsAre(1, 2, 1, 0, kBorder));
  Touch(&history, {1, 2});
  EXPECT_THAT(Next(history, 3), ElementsAre(1, 0, kBorder));
  Touch(&history, {1, 0, kBorder});
  EXPECT_THAT(Next(history, 3), ElementsAre(0, 1, 2));
}

// One flat is used at two places of a step: what came before tells them apart.
TEST(TouchHistory, TellsPlacesApartByWhatCameBefore) {
  TouchHistory history({1, 1, 1, 1});
  const std::vector<int> step = {3, 0, 1, 3, 2, kBorder};
  for (int i = 0; i < 3; ++i) Touch(&history, step);
  history.Append(3);
  EXPECT_THAT(Next(history, 2), ElementsAre(0, 1));
  Touch(&history, {0, 1, 3});
  EXPECT_THAT(Next(history, 2), ElementsAre(2, kBorder));
}

TEST(TouchHistory, FindsItsWayBackAfterAnotherPath) {
  TouchHistory history({1, 1, 1, 1});
  for (int i = 0; i < 3; ++i) Touch(&history, {0, 1, 2, 3, 2, 1, 0, kBorder});
  Touch(&history, {0, 2});  // flat 1 is left out this time
  EXPECT_TRUE(history.KnowsNext());
  Touch(&history, {3, 2});
  EXPECT_THAT(Next(history, 2), ElementsAre(1, 0));
}

// The first backward goes another way than the forward before it.
TEST(TouchHistory, ForwardSaysNothingOfBackward) {
  TouchHistory history({1, 1, 1});
  Touch(&history, {0, 1, 2});
  history.Append(2, /*backward=*/true);
  EXPECT_FALSE(history.KnowsNext());
  history.Append(1, /*backward=*/true);
  EXPECT_FALSE(history.KnowsNext());
}

TEST(TouchHistory, SaysWhetherATouchWasExpected) {
  TouchHistory history({1, 1, 1});
  Touch(&history, kStep);
  EXPECT_TRUE(history.Append(0));
  EXPECT_FALSE(history.Append(2));
}

TEST(TouchHistory, EvaluationHasARecordOfItsOwn) {
  TouchHistory history({1, 1, 1, 1});
  const std::vector<int> evaluation = {0, 1, 3, kBorder};
  Touch(&history, kStep);
  Touch(&history, evaluation);
  Touch(&history, kStep);
  Touch(&history, evaluation);
  Touch(&history, {0, 1});
  history.Append(3);  // only an evaluation does that
  EXPECT_THAT(Next(history, 1), ElementsAre(kBorder));
}

TEST(TouchHistory, CountsElementsUntilTheReuse) {
  TouchHistory history({10, 20, 30});
  Touch(&history, kStep);
  Touch(&history, {0, 1});
  // Next: 2 1 0 border.
  EXPECT_TRUE(history.ReusedWithin(2, 0));
  EXPECT_FALSE(history.ReusedWithin(1, 29));
  EXPECT_TRUE(history.ReusedWithin(1, 30));
  EXPECT_FALSE(history.ReusedWithin(0, 49));
  EXPECT_TRUE(history.ReusedWithin(0, 50));
}

TEST(TouchHistory, NothingIsReusedBeyondABorder) {
  TouchHistory history({10, 20, 30});
  for (int i = 0; i < 3; ++i) Touch(&history, kStep);
  Touch(&history, {0, 1, 2, 1});
  EXPECT_FALSE(history.ReusedWithin(2, 1000000));
  EXPECT_TRUE(history.ReusedWithin(0, 0));
}

// A backward ends a pass, and so does each half of a step's scope.
TEST(TouchHistory, BordersWithoutATouchBetweenThemAreOne) {
  TouchHistory history({1, 1, 1});
  Touch(&history, kStep);
  Touch(&history, {kBorder, kBorder});
  Touch(&history, {0, 1, 2, 1, 0});
  EXPECT_THAT(Next(history, 3), ElementsAre(kBorder, 0, 1));
}

TEST(TouchHistory, ForgetsTheOldestAndGoesOn) {
  TouchHistory history({1, 1, 1}, /*capacity=*/64);
  for (int i = 0; i < 1000; ++i) {
    for (size_t k = 0; k < kStep.size(); ++k) {
      if (i > 2) EXPECT_EQ(history.Expected(0), kStep[k]) << i << " " << k;
      history.Append(kStep[k]);
    }
  }
  EXPECT_EQ(history.Expected(64), kUnknown);
}

}  // namespace
}  // namespace tessera
