// Tests sharding.step_in_backward: the same bits as without it, nothing left
// of gradients for Step, and errors where a step in backward would be wrong.
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/flat/use.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kOn[] = "sharding{step_in_backward:true}";
constexpr char kOnWithUnits[] =
    "sharding{step_in_backward:true,unit_classes:'torch::nn::LinearImpl',"
    "unit_classes:'torch::nn::LayerNormImpl'}";
constexpr char kSgd[] =
    "type:'SGD',params{lr:0.05,momentum:0.9,weight_decay:0.1}";
constexpr char kFirst[] = "in.weight", kLast[] = "out.weight";

// A unit for each module, reduced alone.
TrainingSpec SpecOf(int stage) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.reduce_bucket_size = 1;
  spec.more = kOnWithUnits;
  return spec;
}

// ---- The bits are the oracle's

class StepInBackwardBits
    : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  TrainingSpec Spec() const { return SpecOf(std::get<1>(GetParam())); }
};

TEST_P(StepInBackwardBits, InFloat32) {
  TrainingSpec spec = Spec();
  ExpectEqualsOracle(spec, world_size());
  spec.overlap = false;
  spec.clipping_value = 0.002;
  spec.optimizer = kSgd;
  ExpectEqualsOracle(spec, world_size());
}

// Buckets of several units; masters beside the working copy, and split.
TEST_P(StepInBackwardBits, InBfloat16) {
  TrainingSpec spec = Spec();
  spec.more = kOn;
  spec.reduce_bucket_size = 2000;
  spec.dtype = "bf16";
  spec.check_overflow = false;
  spec.clipping_value = 0.002;
  ExpectEqualsOracle(spec, world_size());
  spec.remainder_masters = true;
  spec.clipping_value = 0;
  ExpectEqualsOracle(spec, world_size());
}

INSTANTIATE_TEST_SUITE_P(All, StepInBackwardBits,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               "Stage",
                                               std::get<1>(info.param));
                         });

// Gradients that come several times, on one rank alone, on none, or where none
// was expected; a parameter in two places; writes of the program.
TEST(StepInBackward, OfModelsWhoseGradientsComeOtherwise) {
  for (const char* const model :
       {"Recomputing", "ChangingRank", "Thawed", "Tied", "Clamped", "UsedTwice",
        "SparseEmbedding"}) {
    for (const int stage : {0, 2, 3}) {
      TrainingSpec spec = SpecOf(stage);
      spec.more = "sharding{step_in_backward:true,max_unit_numel:100}";
      spec.model = model;
      ExpectEqualsOracle(spec, 2);
      if (HasFailure()) FAIL() << model << " at stage " << stage;
    }
  }
}

TEST(StepInBackward, OfReplicasAndRecomputedUnits) {
  TrainingSpec spec = SpecOf(2);
  spec.shard_group = 2;
  ExpectEqualsOracle(spec, 4);
  spec.stage = 3;
  spec.recompute = "auto";
  ExpectEqualsOracle(spec, 4);
}

// ---- What is allowed, and what is not

class StepInBackwardTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<std::string> Run(absl::string_view function) {
    return RunOnRanks(2, function, SpecOf(GetParam()).ToText());
  }
  // All ranks have the parameters that the oracle has after these steps.
  void ExpectSteps(const std::vector<std::string>& answers,
                   const std::vector<Oracle::Loss>& steps) {
    ExpectParameters(answers, SpecOf(GetParam()), 2, steps);
  }
};
INSTANTIATE_TEST_SUITE_P(Stage, StepInBackwardTest,
                         ::testing::Values(0, 1, 2, 3));

// Returns a model after one step: it knows which layer gets no gradient.
absl::StatusOr<Trainee> MakeTrainee(absl::string_view args,
                                    const World& world) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  return t;
}

int64_t GradientBytes() {
  return MemoryLedger::Host().Report()[MemoryKind::kGradients].current_bytes;
}

// Returns the first of `calls` that did not return FailedPrecondition.
absl::Status ExpectRefused(
    const std::vector<std::pair<const char*, absl::Status>>& calls) {
  for (const auto& [name, status] : calls) {
    if (absl::IsFailedPrecondition(status)) continue;
    return absl::InternalError(
        absl::StrCat(name, " returned ", status.ToString()));
  }
  return absl::OkStatus();
}

TESSERA_RANK_FUNCTION(CallsBeforeStep) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  const at::Tensor loss = t.Loss(1);
  const at::Tensor another = t.Loss(2);
  TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
  const int64_t left = GradientBytes();
  if (left != 0 || t.engine->state_bytes().gradients != 0) {
    return absl::InternalError(absl::StrCat(left, " bytes of gradients left"));
  }
  const std::string dir = ::testing::TempDir() + "/step_in_backward";
  TESSERA_RETURN_IF_ERROR(ExpectRefused(
      {{"Backward", t.engine->Backward(another)},
       {"ZeroGrad", t.engine->ZeroGrad()},
       {"Gradient", t.engine->Gradient(kLast).status()},
       {"NonFiniteGradients", t.engine->NonFiniteGradients().status()},
       {"Master", t.engine->Master(kLast).status()},
       {"SetLearningRate", t.engine->SetLearningRate(1)},
       {"FullStateDict", t.engine->FullStateDict().status()},
       {"SaveCheckpoint", t.engine->SaveCheckpoint(dir)},
       {"Close", t.engine->Close()}}));
  for (const char* const name : {kFirst, kLast}) {
    const at::Tensor w = t.parameter(name);
    const absl::Status used =
        CatchTorch("use", [&] { (void)w.detach().square().sum().item(); });
    if (used.ok()) return absl::InternalError("a stepped unit was used");
  }
  t.model->zero_grad();  // of gradients that are used
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(2));
  if (t.engine->step() != 3) return absl::InternalError("step() is not 3");
  return t.Finish();
}

TEST_P(StepInBackwardTest, NothingButStepMayFollow) {
  ExpectSteps(Run("CallsBeforeStep"), {LossOf(0), LossOf(1), LossOf(2)});
}

TESSERA_RANK_FUNCTION(BackwardsThatKeepGradients) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  constexpr auto kArgument = absl::StatusCode::kInvalidArgument;
  BackwardOptions weighted, more;
  weighted.weight = 1;
  more.more_losses = true;
  TESSERA_RETURN_IF_ERROR(ExpectCode(kArgument, t.Backward(0, weighted)));
  TESSERA_RETURN_IF_ERROR(ExpectCode(kArgument, t.Backward(0, more)));
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(kArgument, t.engine->Backward(at::Tensor())));
  {
    NoSyncScope scope(t.engine.get());
    TESSERA_RETURN_IF_ERROR(
        ExpectCode(absl::StatusCode::kFailedPrecondition, t.Backward(0)));
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return t.Finish();
}

TEST_P(StepInBackwardTest, WeightsAndFurtherLossesAreRefusedAndChangeNothing) {
  ExpectSteps(Run("BackwardsThatKeepGradients"), {LossOf(0), LossOf(1)});
}

// Runs `at_end` when the gradient of the first layer has come, so that the last
// layers are stepped; the engine must be lost afterwards. Returns both errors.
std::string LostBy(Trainee* t, at::Tensor loss,
                   const std::function<void()>& at_end) {
  const at::Tensor first = t->parameter(kFirst);
  first.register_hook([&](const at::Tensor&) { at_end(); });
  const absl::Status failed = t->engine->Backward(loss);
  const absl::Status next = t->engine->Step();
  return absl::StrCat(failed.ToString(), "\n", next.ToString());
}

TESSERA_RANK_FUNCTION(FailHalfWay) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  return LostBy(&t, t.Loss(1), [&] {
    if (t.rank == 1) throw std::runtime_error("a hook has failed");
  });
}

TEST_P(StepInBackwardTest, AFailureAfterAStepEndsTheEngineOnAllRanks) {
  const auto lost =
      AllOf(HasSubstr("a hook has failed"), HasSubstr("from a checkpoint"));
  EXPECT_THAT(Run("FailHalfWay"), Each(lost));
}

// The last layer's value, after its step.
TESSERA_RANK_FUNCTION(UseAfterStep) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  const at::Tensor last = t.parameter(kLast);
  return LostBy(&t, t.Loss(1), [&] {
    torch::NoGradGuard no_grad;
    (void)last.sum();
  });
}

TEST_P(StepInBackwardTest, AUseOfASteppedUnitIsAnError) {
  EXPECT_THAT(Run("UseAfterStep"),
              Each(AllOf(HasSubstr("the unit was stepped within backward"),
                         HasSubstr("from a checkpoint"))));
}

// A graph has saved the last layer's value by a path without its gradient, and
// unpacks it at the end.
TESSERA_RANK_FUNCTION(UnpackAfterStep) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  const at::Tensor first = t.parameter(kFirst), last = t.parameter(kLast);
  const at::Tensor other =
      first.flatten().narrow(0, 0, 5) * last.detach().flatten().narrow(0, 0, 5);
  return LostBy(&t, other.sum() + t.Loss(1), [] {});
}

TEST_P(StepInBackwardTest, ASavedValueOfASteppedUnitIsAnError) {
  EXPECT_THAT(Run("UnpackAfterStep"),
              Each(AllOf(HasSubstr("modified by an inplace operation"),
                         HasSubstr("from a checkpoint"))));
}

// Another gradient of the last layer, by a backward within this one.
TESSERA_RANK_FUNCTION(LateGradient) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  const at::Tensor other = t.parameter(kLast).sum();
  return LostBy(&t, t.Loss(1), [&] { other.backward(); });
}

TEST_P(StepInBackwardTest, ALateGradientOfASteppedUnitIsAnError) {
  EXPECT_THAT(
      Run("LateGradient"),
      Each(AllOf(StartsWith("FAILED_PRECONDITION"),
                 HasSubstr("'out.weight' got another gradient after the "
                           "unit's were reduced"),
                 HasSubstr("from a checkpoint"))));
}

// A unit that somebody holds is left to Step.
TESSERA_RANK_FUNCTION(HeldUnit) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(args, world));
  {
    const Use held(t.parameter(kLast));
    TESSERA_RETURN_IF_ERROR(t.Backward(1));
  }
  if (GradientBytes() == 0) return absl::InternalError("no gradient is left");
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  return t.Finish();
}

TEST_P(StepInBackwardTest, AHeldUnitIsSteppedByStep) {
  ExpectSteps(Run("HeldUnit"), {LossOf(0), LossOf(1)});
}

}  // namespace
}  // namespace tessera
