// zero_grad() of modules and optimizers, in the places where libtorch's loops
// have it: it drops what libtorch's would drop, or is an error that says what
// to call. And losses that add up, over one graph and in an accumulation.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/oracle.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class ZeroGradTest : public ::testing::TestWithParam<int> {
 protected:
  ZeroGradTest() { spec_.stage = GetParam(); }
  std::vector<std::string> Run(absl::string_view function) {
    return RunOnRanks(2, function, spec_.ToText());
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, ZeroGradTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

absl::StatusOr<Trainee> MakeTrainee(const World& world,
                                    absl::string_view args) {
  return Trainee::Make(TrainingSpec::FromText(args), world.communicator());
}

// ---- gradients from elsewhere

// A look at gradients, as libtorch's programs take it; and the error without a
// zero_grad(), which drops nothing.
TESSERA_RANK_FUNCTION(LookAtGradients) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  t.Loss(5).backward();
  t.model->zero_grad();
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  t.Loss(6).backward();
  t.model->zero_grad(/*set_to_none=*/false);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  t.Loss(7).backward();
  const absl::Status kept = t.Backward(2);
  t.model->zero_grad();
  TESSERA_RETURN_IF_ERROR(t.TrainStep(2));
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return absl::StrCat(kept.ToString(), "\n", parameters);
}

TEST_P(ZeroGradTest, DropsWhatABareBackwardLeft) {
  std::vector<std::string> answers = Run("LookAtGradients");
  EXPECT_THAT(
      TakeFirstLines(&answers),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("parameter '"),
                 HasSubstr("that no Backward of this engine made"),
                 HasSubstr("zero_grad()"), HasSubstr("add_outside"))));
  ExpectParameters(answers, spec_, 2, {LossOf(0), LossOf(1), LossOf(2)});
}

// ---- the engine's own

// A Backward whose gradients are dropped, by `drop`, then a good step.
absl::StatusOr<std::string> DropAndStep(
    Trainee t, const std::function<void(torch::nn::Module&)>& drop) {
  TESSERA_RETURN_IF_ERROR(t.Backward(8));
  drop(*t.model);
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, t.engine->Step()));
  TESSERA_RETURN_IF_ERROR(t.Backward(9));
  drop(*t.model);
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  drop(*t.model);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return t.Finish();
}

TESSERA_RANK_FUNCTION(DropByModule) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  return DropAndStep(std::move(t),
                     [](torch::nn::Module& module) { module.zero_grad(); });
}

TESSERA_RANK_FUNCTION(DropByOptimizer) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  torch::optim::SGD optimizer(t.model->parameters(), /*lr=*/0.1);
  return DropAndStep(std::move(t),
                     [&](torch::nn::Module&) { optimizer.zero_grad(); });
}

TEST_P(ZeroGradTest, DropsWhatBackwardBrought) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (const char* by : {"DropByModule", "DropByOptimizer"}) {
      ExpectParameters(Run(by), spec_, 2, {LossOf(0), LossOf(1)});
    }
  }
}

TESSERA_RANK_FUNCTION(DropOnRank1) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  if (t.rank == 1) t.model->zero_grad();
  const absl::Status next = t.Backward(1);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return next.ToString();
}

TEST_P(ZeroGradTest, OfOneRankIsNoticed) {
  EXPECT_THAT(Run("DropOnRank1"),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("must call the same Step and ZeroGrad"))));
}

TESSERA_RANK_FUNCTION(DropOfOneModule) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  t.model->children().front()->zero_grad();
  const absl::Status step = t.engine->Step();
  const absl::Status backward = t.Backward(0);
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return absl::StrCat(step.ToString(), "; ", backward.ToString(), "\n",
                      parameters);
}

TEST_P(ZeroGradTest, OfAPartOfTheModuleIsAnError) {
  std::vector<std::string> answers = Run("DropOfOneModule");
  EXPECT_THAT(
      TakeFirstLines(&answers),
      Each(testing::ContainsRegex(
          "FAILED_PRECONDITION: zero_grad.* for parameter 'in.* not for .*; "
          "FAILED_PRECONDITION: .*zero_grad.* for parameter 'in.* not for ")));
  ExpectParameters(answers, spec_, 2, {LossOf(0)});
}

TESSERA_RANK_FUNCTION(DropInAnAccumulation) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  t.model->zero_grad();
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  t.model->zero_grad();
  const absl::Status middle = t.Backward(1);
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return absl::StrCat(middle.ToString(), "\n", parameters);
}

TEST_P(ZeroGradTest, InTheMiddleOfAnAccumulationIsAnError) {
  spec_.accumulation = 2;
  for (const char* mode : {"each", "local"}) {
    spec_.accumulation_mode = mode;
    std::vector<std::string> answers = Run("DropInAnAccumulation");
    EXPECT_THAT(TakeFirstLines(&answers),
                Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                           HasSubstr("after micro-batch 1 of the 2"))));
    ExpectParameters(answers, spec_, 2, {OwnLoss()});
  }
}

// ---- several losses

// Several Backwards before one Step are usual with libtorch.
TESSERA_RANK_FUNCTION(StepForTwoBackwards) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  const absl::Status second = t.Backward(1);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return second.ToString();
}

TEST_P(ZeroGradTest, AStepForSeveralBackwardsOfAnAccumulationIsAnError) {
  spec_.accumulation = 2;
  EXPECT_THAT(
      Run("StepForTwoBackwards"),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                 HasSubstr("gradient_accumulation_steps is 2"),
                 HasSubstr("call Step after each"), HasSubstr("more_losses"))));
}

// The second goes through the same graph.
TESSERA_RANK_FUNCTION(TwoBackwardsThroughOneGraph) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world, args));
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor loss = t.Loss(i);
    BackwardOptions first;
    first.more_losses = first.retain_graph = true;
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss, first));
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  return t.Finish();
}

TEST_P(ZeroGradTest, AGraphThatIsRetainedTakesAnotherBackward) {
  // The gradient is exactly twice that of one Backward.
  const Oracle::Loss twice = [](torch::nn::Module& module, int rank,
                                int64_t micro_batch) {
    return OwnLoss()(module, rank, micro_batch) * 2;
  };
  for (const char* model : {"Mlp", "Gpt", "Recomputing"}) {
    spec_.model = model;
    ExpectParameters(Run("TwoBackwardsThroughOneGraph"), spec_, 2,
                     {twice, twice});
  }
}

}  // namespace
}  // namespace tessera
