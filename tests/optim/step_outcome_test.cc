// Tests StepOutcome on a device without hardware.
#include "optim/step_outcome.h"

#include <torch/torch.h>

#include <utility>

#include "base/status_matchers.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StepOutcomeTest : public ::testing::TestWithParam<testdevice::Mode> {
 protected:
  StepOutcomeTest() {
    testdevice::Register({});
    testdevice::SetMode(GetParam());
    testdevice::ClearFaults();
    finish_.skip_on_overflow = true;
    scalars_ = at::zeros({kStepScalars},
                         at::TensorOptions(at::kDouble).device(TestDevice(1)));
  }
  ~StepOutcomeTest() override {
    testdevice::CheckFreed();
    EXPECT_THAT(testdevice::Faults(), IsEmpty());
    testdevice::SetMode(testdevice::Mode::kAtOnce);
  }
  void Set(StepScalar which, double value) { scalars_[which].fill_(value); }
  StepOutcome Make(int64_t ranks = 1) {
    return StepOutcome(std::exchange(scalars_, {}), finish_, ranks);
  }

  NormFinish finish_;
  at::Tensor scalars_;
};

INSTANTIATE_TEST_SUITE_P(All, StepOutcomeTest,
                         ::testing::Values(testdevice::Mode::kAtOnce,
                                           testdevice::Mode::kWorkers),
                         [](const auto& info) {
                           return info.param == testdevice::Mode::kAtOnce
                                      ? "AtOnce"
                                      : "Workers";
                         });

TEST_P(StepOutcomeTest, SaysWhatTheDeviceWrote) {
  Set(kSkip, 1);
  Set(kGradNorm, 3);
  Set(kClippedNorm, 2);
  StepOutcome outcome = Make();
  EXPECT_TRUE(outcome.pending());
  EXPECT_TRUE(outcome.may_be_skipped());
  EXPECT_FALSE(outcome.only_reports());
  const auto result = outcome.Take();
  ASSERT_THAT(result, IsOk());
  EXPECT_TRUE(result->skipped);
  EXPECT_EQ(result->grad_norm, 3);
  EXPECT_EQ(result->clipped_norm, 2);
  EXPECT_FALSE(outcome.pending());
}

TEST_P(StepOutcomeTest, IsKnownOnOtherStreamsToo) {
  Set(kSkip, 1);
  StepOutcome outcome = Make();
  const c10::Stream side =
      c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
          .getStreamFromGlobalPool(TestDevice(1));
  at::Tensor skipped;
  {
    const c10::StreamGuard guard(side);
    skipped = outcome.Skipped();
  }
  // The side stream reads the scalars, perhaps, when they are freed.
  EXPECT_THAT(outcome.Take(), IsOk());
  testdevice::CheckFreed();
  EXPECT_THAT(testdevice::Faults(), IsEmpty());
  const c10::StreamGuard guard(side);
  EXPECT_TRUE(skipped.item().toBool());
}

TEST_P(StepOutcomeTest, ReplicasThatDifferAreNamed) {
  finish_.skip_on_overflow = false;
  finish_.group_size = 2;
  EXPECT_TRUE(Make(/*ranks=*/2).only_reports());
  scalars_ = at::zeros({kStepScalars},
                       at::TensorOptions(at::kDouble).device(TestDevice(1)));
  Set(kReplicasDiffer, 1 + 4);
  StepOutcome outcome = Make(/*ranks=*/6);
  EXPECT_FALSE(outcome.only_reports());
  EXPECT_THAT(outcome.Take().status(),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("gradients of ranks 4 to 5 are not those of "
                                 "ranks 0 to 1")));
}

TEST_P(StepOutcomeTest, OneThatIsKnownWaitsForNothing) {
  ShardedStepResult result;
  result.grad_norm = 5;
  StepOutcome outcome(result);
  testdevice::ResetHostWaits();
  EXPECT_FALSE(outcome.pending());
  EXPECT_FALSE(outcome.may_be_skipped());
  EXPECT_EQ(outcome.Take()->grad_norm, 5);
  EXPECT_EQ(testdevice::CountHostWaits(), 0);
}

}  // namespace
}  // namespace tessera
