// Tests what the engine's calls do and refuse, on two ranks, at every stage.
// Where a test trains, the oracle does the same in plain libtorch.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int kWorldSize = 2;
constexpr char kSomeParameter[] = "blocks.1.up.weight";

TrainingSpec SpecOf(absl::string_view stage, int accumulation = 1) {
  TrainingSpec spec;
  TORCH_CHECK(absl::SimpleAtoi(stage, &spec.stage));
  spec.accumulation = accumulation;
  return spec;
}

class EngineTest : public ::testing::TestWithParam<int> {
 protected:
  std::string stage() const { return absl::StrCat(GetParam()); }

  // The answers of all ranks, errors as text.
  std::vector<std::string> Run(absl::string_view function,
                               absl::string_view more_args = "") {
    return RunOnRanks(kWorldSize, function, absl::StrCat(stage(), more_args));
  }
  // Both ranks have the parameters that the oracle has after these steps.
  void ExpectParameters(const std::vector<std::string>& answers,
                        const std::vector<Oracle::Loss>& steps,
                        int accumulation = 1) {
    tessera::ExpectParameters(answers, SpecOf(stage(), accumulation),
                              kWorldSize, steps);
  }
};

// ---- Step and ZeroGrad

TESSERA_RANK_FUNCTION(StepWithoutBackward) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(SpecOf(args), world.communicator()));
  constexpr auto kCode = absl::StatusCode::kFailedPrecondition;
  TESSERA_RETURN_IF_ERROR(ExpectCode(kCode, t.engine->Step()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const absl::Status again = t.engine->Step();
  TESSERA_RETURN_IF_ERROR(ExpectCode(kCode, again));
  if (t.engine->step() != 1) return absl::InternalError("step() is not 1");
  return t.Finish();
}

TEST_P(EngineTest, StepWithoutBackwardIsAnErrorAndChangesNothing) {
  ExpectParameters(Run("StepWithoutBackward"), {LossOf(0)});
}

TESSERA_RANK_FUNCTION(StepOffTheBoundary) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(SpecOf(args, 2), world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(Record before, ParametersOf(*t.engine, *t.model));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(Record after, ParametersOf(*t.engine, *t.model));
  if (after != before || t.engine->step() != 0) {
    return absl::InternalError("a step off the boundary did something");
  }
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, t.engine->Step()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  if (t.engine->step() != 1) return absl::InternalError("step() is not 1");
  return t.Finish();
}

TEST_P(EngineTest, StepOffTheBoundaryOnlyCounts) {
  ExpectParameters(Run("StepOffTheBoundary"), {OwnLoss()}, 2);
}

TESSERA_RANK_FUNCTION(ZeroGrad) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(SpecOf(args, 2), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(7));
  TESSERA_RETURN_IF_ERROR(t.Backward(8));
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_ASSIGN_OR_RETURN(at::Tensor none, t.engine->Gradient(kSomeParameter));
  if (none.defined()) return absl::InternalError("a gradient is left");
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, t.engine->Step()));
  // A whole step of two micro-batches follows: the counted one is forgotten.
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  if (t.engine->step() != 1) return absl::InternalError("step() is not 1");
  return t.Finish();
}

TEST_P(EngineTest, ZeroGradDropsGradientsAndCountedMicroBatches) {
  ExpectParameters(Run("ZeroGrad"), {OwnLoss()}, 2);
}

// Rank 1 alone drops its gradients; the next Backward tells both.
TESSERA_RANK_FUNCTION(ZeroGradOnOneRank) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(SpecOf(args, 2), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  if (world.rank() == 1) TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  return t.Backward(1).ToString();
}

TEST_P(EngineTest, AZeroGradOfOneRankIsNoticed) {
  EXPECT_THAT(Run("ZeroGradOnOneRank"),
              Each(AllOf(StartsWith("FAILED_PRECONDITION"),
                         HasSubstr("rank 1 is at optimizer step 0, "
                                   "micro-batch 0, Backward 0 of the step, "
                                   "rank 0 at optimizer step 0, micro-batch 1, "
                                   "Backward 1 of the step"))));
}

TESSERA_RANK_FUNCTION(StepWithAStrayGradient) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(SpecOf(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  t.model->Loss(t.rank, 1).backward();
  const absl::Status bare = t.engine->Step();
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  const at::Tensor w = t.parameter(kSomeParameter);
  w.mutable_grad() = torch::ones(w.sizes());
  const absl::Status by_hand = t.engine->Step();
  return absl::StrCat(bare.ToString(), "\n", by_hand.ToString());
}

TEST_P(EngineTest, AStrayGradientIsNotDroppedInSilence) {
  EXPECT_THAT(
      Run("StepWithAStrayGradient"),
      Each(AllOf(StartsWith("FAILED_PRECONDITION: parameter '"),
                 HasSubstr(absl::StrCat("\nFAILED_PRECONDITION: parameter '",
                                        kSomeParameter, "' has a gradient")))));
}

TESSERA_RANK_FUNCTION(NoOptimizer) {
  proto::Config config = ConfigOf(SpecOf(args));
  config.clear_optimizer();
  auto model = BuildModel("Mlp", world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
  TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), 0)));
  TESSERA_ASSIGN_OR_RETURN(at::Tensor g, engine->Gradient(kSomeParameter));
  if (engine->state_bytes().optimizer != 0) {
    return absl::InternalError("there is an optimizer");
  }
  const absl::Status step = engine->Step();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(PrintOf(g), " ", step.ToString());
}

TEST_P(EngineTest, WithoutAnOptimizerThereAreGradientsAndNoStep) {
  TrainingSpec spec = SpecOf(stage());
  Oracle oracle([] { return MakeTestModel("Mlp"); },
                OracleOptionsOf(spec, kWorldSize));
  oracle.TrainStep(OwnLoss());
  EXPECT_THAT(
      Run("NoOptimizer"),
      Each(AllOf(StartsWith(PrintOf(oracle.gradient(kSomeParameter))),
                 HasSubstr("FAILED_PRECONDITION"), HasSubstr("optimizer"))));
}

// ---- Errors

// Throws in backward, in a hook of one parameter.
absl::Status FailingBackward(Trainee& t, bool fails) {
  at::Tensor parameter = t.parameter(kSomeParameter);
  unsigned hook = 0;
  if (fails) {
    hook = parameter.register_hook([](at::Tensor) -> at::Tensor {
      throw std::runtime_error("out of paper");
    });
  }
  const absl::Status status = t.Backward(9);
  if (fails) parameter.remove_hook(hook);
  return status;
}

// args: stage, and which rank fails, or "a" for all.
TESSERA_RANK_FUNCTION(ErrorInBackward) {
  const bool fails = args[1] == 'a' || args[1] - '0' == world.rank();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(SpecOf(args.substr(0, 1), 2), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const absl::Status status = FailingBackward(t, fails);
  if (status.ok()) return absl::InternalError("no error");
  // The micro-batch is gone, the one before it is kept.
  const absl::Status next = t.TrainStep(1);
  if (!next.ok()) return status.ToString();
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(status.ToString(), "\n", parameters);
}

TEST_P(EngineTest, AnErrorOfOneRankEndsBackwardOnAll) {
  if (GetParam() == 3) return;  // below
  for (const char* failing : {"0", "1"}) {
    std::vector<std::string> answers = Run("ErrorInBackward", failing);
    EXPECT_THAT(TakeFirstLines(&answers), Each(HasSubstr("out of paper")));
    ExpectParameters(answers, {OwnLoss()}, 2);
  }
}

TEST_P(EngineTest, TheOtherRanksLearnWhichRankFailed) {
  if (GetParam() == 3) return;  // below
  std::vector<std::string> answers = Run("ErrorInBackward", "1");
  EXPECT_THAT(TakeFirstLines(&answers),
              ElementsAre(AllOf(HasSubstr("rank 1"), HasSubstr("out of paper")),
                          HasSubstr("out of paper")));
}

TEST_P(EngineTest, AnErrorOfAllRanksLeavesTheEngineUsable) {
  std::vector<std::string> answers = Run("ErrorInBackward", "a");
  EXPECT_THAT(TakeFirstLines(&answers), Each(HasSubstr("out of paper")));
  ExpectParameters(answers, {OwnLoss()}, 2);
}

// Rank 0 may then wait in a gather that rank 1 will not join.
TEST(EngineStage3Test, AnErrorOfOneRankEndsBothInTime) {
  const std::vector<std::string> texts =
      RunOnRanks(kWorldSize, "ErrorInBackward", "31", absl::Seconds(15));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("out of paper"),
                                Not(HasSubstr("DEADLINE")))));
  EXPECT_THAT(texts[0], HasSubstr("rank 1"));
}

TESSERA_RANK_FUNCTION(BadLosses) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(SpecOf(args), world.communicator()));
  std::vector<std::string> errors = {
      t.engine->Backward(at::Tensor()).ToString(),
      t.engine->Backward(torch::ones({3}, torch::requires_grad())).ToString(),
      t.engine->Backward(torch::ones({})).ToString()};
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(absl::StrJoin(errors, " "), "\n", parameters);
}

TEST_P(EngineTest, ALossThatIsNoneIsRefused) {
  std::vector<std::string> answers = Run("BadLosses");
  EXPECT_THAT(TakeFirstLines(&answers),
              Each(AllOf(HasSubstr("the loss is undefined"),
                         HasSubstr("one element, got 3"),
                         HasSubstr("does not require a gradient"))));
  ExpectParameters(answers, {LossOf(0)});
}

TESSERA_RANK_FUNCTION(WrongNames) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(SpecOf(args), world.communicator()));
  std::string text =
      absl::StrCat(t.engine->Parameter("blcks.1").status().ToString(), " ",
                   t.engine->Gradient("").status().ToString());
  auto second = MakeEngine(t.model, SpecOf(args), world.communicator());
  absl::StrAppend(&text, " ", second.status().ToString());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  absl::StrAppend(&text, " ", t.engine->Step().ToString());
  return text;
}

TEST_P(EngineTest, NamesAndEnginesThatAreNotThereAreRefused) {
  EXPECT_THAT(
      Run("WrongNames"),
      Each(AllOf(HasSubstr("NOT_FOUND: the engine has no parameter 'blcks.1'"),
                 HasSubstr("belongs to another tessera::Engine"),
                 HasSubstr("the engine was closed"))));
}

// ---- the norm

// args: stage, then "clipped" by a norm that is never reached, "reported", or
// "". The norms of two steps and the parameters after them.
TESSERA_RANK_FUNCTION(NormsOfSteps) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const TrainingSpec spec = SpecOf(words[0]);
  proto::Config config = ConfigOf(spec);
  config.set_gradient_clipping(words[1] == "clipped" ? 1e30 : 0);
  config.mutable_sharding()->set_report_grad_norm(words[1] == "reported");
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string norms;
  for (int64_t i = 0; i < 2; ++i) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(i));
    const StepReport& report = t.engine->last_step();
    absl::StrAppendFormat(&norms, "%a %a ", report.grad_norm,
                          report.clipped_norm);
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return absl::StrCat(norms, "\n", parameters);
}

TEST_P(EngineTest, TheNormIsReportedWithoutClippingIfAskedFor) {
  const std::vector<std::string> clipped = Run("NormsOfSteps", " clipped");
  EXPECT_THAT(clipped, Each(HasSubstr("0x1.")));
  EXPECT_EQ(Run("NormsOfSteps", " reported"), clipped);
  std::vector<std::string> answers = Run("NormsOfSteps", " ");
  EXPECT_THAT(TakeFirstLines(&answers), Each("nan nan nan nan "));
  ExpectParameters(answers, {LossOf(0), LossOf(1)});
}

// ---- Close

TESSERA_RANK_FUNCTION(CloseAndTrainOn) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(SpecOf(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  // After Close all works as in plain libtorch: pointers, gradients, saving, a
  // change of dtype.
  const at::Tensor parameter = t.parameter(kSomeParameter);
  if (parameter.data_ptr() == nullptr) return absl::InternalError("no data");
  t.model->Loss(t.rank, 1).backward();
  if (!parameter.grad().defined()) return absl::InternalError("no .grad");
  t.model->zero_grad();
  std::ostringstream saved;
  torch::save(parameter, saved);
  t.model->to(torch::kDouble);
  t.model->to(torch::kFloat);
  TESSERA_ASSIGN_OR_RETURN(
      t.engine, MakeEngine(t.model, SpecOf(args), world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(saved.str().size() > parameter.nbytes(), "\n",
                      parameters);
}

TEST_P(EngineTest, CloseGivesAPlainModuleBack) {
  std::vector<std::string> answers = Run("CloseAndTrainOn");
  EXPECT_THAT(TakeFirstLines(&answers), Each("1"));
  ExpectParameters(answers, {LossOf(0)});
}

INSTANTIATE_TEST_SUITE_P(All, EngineTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
