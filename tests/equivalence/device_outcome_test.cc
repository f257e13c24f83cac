// Tests who learns the outcome of a step when, since the device knows it first,
// and that errors and checkpoints are right although it comes late. The device
// is one without hardware (testing/device/test_device.h), with its kernels.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/equivalence/device_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class OutcomeTest : public ::testing::TestWithParam<std::string> {
 protected:
  OutcomeTest() {
    way_.device = GetParam();
    way_.stage = 3;
  }
  Way way_;
};

INSTANTIATE_TEST_SUITE_P(All, OutcomeTest, ::testing::Values("1", "1/workers"),
                         [](const auto& info) {
                           return info.param == "1" ? "AtOnce" : "Workers";
                         });

std::string CodeOf(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), " ");
}

// A step overflows at the least scale, and rank 0 asks for its outcome. Such a
// step waits for the device, to name what was not finite.
TESSERA_RANK_FUNCTION(LeastScale) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  const absl::Status skipped = run.TrainStep(kOverflow);
  if (!absl::StrContains(skipped.message(), " of unit '")) {
    return skipped.ToString();
  }
  std::string codes = CodeOf(skipped);
  if (world.rank() == 0 && !run.engine->last_step().skipped) return "made";
  TESSERA_RETURN_IF_ERROR(run.Backward());
  absl::StrAppend(&codes, CodeOf(run.engine->Step()));
  absl::StrAppend(&codes, run.engine->step(), " ",
                  run.engine->last_step().skipped_steps, " ");
  absl::StrAppend(&codes, CodeOf(run.TrainStep(kOverflow)));
  return absl::StrCat(codes, CodeOf(run.engine->Close()));
}

TEST_P(OutcomeTest, AnOverflowAtTheLeastScaleIsNamedByItsStep) {
  way_.fp16 = 0;
  EXPECT_THAT(RankPool::Get(2)->Run("LeastScale", TextOf(way_)),
              Each(IsOkAndHolds("OUT_OF_RANGE OK 1 1 OUT_OF_RANGE OK ")));
}

// Nothing but overflows, and losses that are infinite: which step says so, and
// what all say.
TESSERA_RANK_FUNCTION(SkipsForEver) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  int steps = 1;
  absl::Status status = run.TrainStep();
  for (; status.ok() && steps < 60; ++steps) status = run.TrainStep(kOverflow);
  const std::string said =
      absl::StrCat(steps, " ", run.engine->step(), " ", status.ToString());
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return said;
}

TEST_P(OutcomeTest, ARunThatSkipsAllStepsEndsWithNames) {
  way_.fp16 = kBf16;
  EXPECT_THAT(
      RankPool::Get(2)->Run("SkipsForEver", TextOf(way_)),
      Each(IsOkAndHolds(AllOf(
          HasSubstr("51 1 OUT_OF_RANGE: Step: 50 optimizer steps in a row"),
          HasSubstr("gradients of 'a.weight' of unit '")))));
  for (const int rank : {0, 1}) {
    const std::string& said = RankPool::Get(2)->stderr_of(rank);
    const auto times = [&](absl::string_view what) {
      return absl::StrReplaceAll(said, {{what, ""}}).size();
    };
    const size_t all = said.size();
    EXPECT_EQ(all - times("the loss of this rank"), 21u) << said;
    EXPECT_EQ(all - times("was skipped"), rank == 0 ? 11u : 0u) << said;
  }
}

// In this run nothing is skipped, and no norm is computed.
TESSERA_RANK_FUNCTION(InfiniteLosses) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));
  // At once, while the device still computes the loss.
  TESSERA_RETURN_IF_ERROR(run.engine->Close());
  return std::string();
}

TEST_P(OutcomeTest, ALossOfTheLastStepThatIsNotFiniteIsSaidByClose) {
  EXPECT_THAT(RankPool::Get(2)->Run("InfiniteLosses", TextOf(way_)),
              Each(IsOkAndHolds("")));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(1),
              HasSubstr("the loss of this rank in optimizer step 2 is inf"));
}

// What autograd calls cuDNN's attention. Nothing of it is here but the name.
struct AttentionNode : torch::autograd::Node {
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override {
    return "ScaledDotProductCudnnAttentionBackward0";
  }
};

// Two steps whose backward would add up in any order on a GPU.
TESSERA_RANK_FUNCTION(UnorderedSteps) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  for (int step = 0; step < 2; ++step) {
    const at::Tensor h = run.net->forward(run.x);
    const auto node = std::make_shared<AttentionNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(h));
    at::Tensor loss = h.detach().clone();
    torch::autograd::create_gradient_edge(loss, node);
    TESSERA_RETURN_IF_ERROR(run.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return std::string();
}

TEST_P(OutcomeTest, ABackwardInAnyOrderIsSaidOnceOfADevice) {
  for (const bool on_device : {true, false}) {
    if (!on_device) way_.device = "";
    EXPECT_THAT(RankPool::Get(1)->Run("UnorderedSteps", TextOf(way_)),
                Each(IsOkAndHolds("")));
    const std::string& said = RankPool::Get(1)->stderr_of(0);
    const auto parts = absl::StrSplit(
        said,
        "the backward of aten::_scaled_dot_product_cudnn_attention adds up");
    EXPECT_EQ(std::distance(parts.begin(), parts.end()), on_device ? 2 : 1)
        << said;
  }
}

// `args` is "way|folder|what". Returns the state after four steps, of which the
// second and the third overflow, and the gradient of the fourth. With "resumed"
// the run is saved after the third step, whose outcome nobody has asked for,
// and another engine goes on.
TESSERA_RANK_FUNCTION(Overflows) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  const Way way = WayOf(words[0]);
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(way, world));
  for (const double factor : {1.0, kOverflow, kOverflow}) {
    TESSERA_RETURN_IF_ERROR(run.TrainStep(factor));
  }
  if (words[2] == "resumed") {
    TESSERA_RETURN_IF_ERROR(run.engine->SaveCheckpoint(words[1]));
    TESSERA_RETURN_IF_ERROR(run.Finish().status());
    TESSERA_ASSIGN_OR_RETURN(run, DeviceRun::Make(way, world));
    TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));  // to be forgotten
    TESSERA_RETURN_IF_ERROR(run.engine->LoadCheckpoint(words[1]).status());
  }
  TESSERA_RETURN_IF_ERROR(run.Backward());
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                           run.engine->Gradient("a.weight"));
  TESSERA_RETURN_IF_ERROR(run.engine->Step());
  TESSERA_ASSIGN_OR_RETURN(const std::string state, run.Finish());
  return absl::StrCat(PrintOf(gradient), "\n", state);
}

TEST_P(OutcomeTest, ACheckpointAfterASkippedStepIsRight) {
  way_.fp16 = 8;
  way_.clipping = 0.5;
  const TempFolder folder;
  Way plain = way_;
  plain.device = "";
  const auto run = [&](const Way& way, const char* what) {
    return RankPool::Get(2)->Run(
        "Overflows",
        absl::StrCat(TextOf(way), "|", folder.path(), "/checkpoint|", what));
  };
  const auto expected = run(plain, "");
  ASSERT_THAT(
      expected,
      Each(IsOkAndHolds(HasSubstr("steps 2 skipped 2 last 0 scale 64 norm "))));
  EXPECT_THAT(run(way_, ""), Each(IsOkAndHolds(*expected[0])));
  EXPECT_THAT(run(way_, "resumed"), Each(IsOkAndHolds(*expected[0])));
}

// Losses and steps on streams of their own, which overflow by turns.
TESSERA_RANK_FUNCTION(TakesTurns) {
  const Way way = WayOf(args);
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(way, world));
  for (const double factor : {1.0, kOverflow, 1.0, 1.0, kOverflow, 1.0}) {
    TESSERA_RETURN_IF_ERROR(run.Backward(factor));
    std::optional<c10::StreamGuard> aside;
    if (!way.device.empty()) {
      aside.emplace(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
                        .getStreamFromGlobalPool(testdevice::TestDevice(1)));
    }
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
  }
  return run.Finish();
}

TEST_P(OutcomeTest, StepsThatAreSkippedOnOtherStreamsChangeNothing) {
  way_.clipping = 0.5;
  for (const int fp16 : {8, kBf16}) {
    way_.fp16 = fp16;
    Way plain = way_;
    plain.device = "";
    const auto expected = RankPool::Get(2)->Run("TakesTurns", TextOf(plain));
    ASSERT_THAT(expected, Each(IsOkAndHolds(HasSubstr("steps 4 skipped 2"))));
    EXPECT_THAT(RankPool::Get(2)->Run("TakesTurns", TextOf(way_)),
                Each(IsOkAndHolds(*expected[0])));
  }
}

// A gradient of elsewhere is multiplied with the scale, which an overflow has
// halved.
TESSERA_RANK_FUNCTION(AddsOutside) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));
  run.net->forward(run.x * 2).backward();
  BackwardOptions options;
  options.add_outside = true;
  TESSERA_RETURN_IF_ERROR(
      run.engine->Backward(run.net->forward(run.x), options));
  TESSERA_RETURN_IF_ERROR(run.engine->Step());
  return run.Finish();
}

TEST_P(OutcomeTest, GradientsOfElsewhereHaveTheScaleOfTheLoss) {
  way_.fp16 = 8;
  Way plain = way_;
  plain.device = "";
  const auto expected = RankPool::Get(2)->Run("AddsOutside", TextOf(plain));
  ASSERT_THAT(expected, Each(IsOk()));
  EXPECT_THAT(RankPool::Get(2)->Run("AddsOutside", TextOf(way_)),
              Each(IsOkAndHolds(*expected[0])));
}

// Its all-reduces over replicas, which are all ranks, give rank 1 other bits.
class Damaged : public FakeCommunicator {
 public:
  using FakeCommunicator::FakeCommunicator;
  CommFuture Start(CommCall call, CommTag tag) override {
    const bool damaged =
        rank() == 1 && absl::EndsWith(tag.what, ", over replicas");
    const at::Tensor sum = call.out;
    CommFuture done = FakeCommunicator::Start(std::move(call), std::move(tag));
    if (damaged && done.Wait().ok()) sum.add_(1);
    return done;
  }
};

TESSERA_RANK_FUNCTION(ReplicasPart) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  const Way way = WayOf(words[0]);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> group,
                           GroupOf(way, world));
  TESSERA_ASSIGN_OR_RETURN(
      DeviceRun run,
      DeviceRun::Make(way, std::make_shared<Damaged>(std::move(group))));
  std::string codes = CodeOf(run.TrainStep());
  absl::StrAppend(&codes, CodeOf(run.engine->SaveCheckpoint(words[1])));
  TESSERA_RETURN_IF_ERROR(run.Backward());
  return absl::StrCat(codes, run.engine->Step().ToString());
}

TEST_P(OutcomeTest, ReplicasThatDifferAreNamedByAllThatComesAfter) {
  way_.stage = 1;
  way_.clipping = 0.5;
  way_.shard_group = 1;
  const TempFolder folder;
  RankPoolOptions options;
  options.world_size = 2;
  RankPool pool(options);
  EXPECT_THAT(
      pool.Run("ReplicasPart",
               absl::StrCat(TextOf(way_), "|", folder.path(), "/checkpoint")),
      Each(IsOkAndHolds(
          AllOf(HasSubstr("OK INTERNAL INTERNAL: "),
                HasSubstr("gradients of rank 1 are not those of rank 0")))));
}

}  // namespace
}  // namespace tessera
