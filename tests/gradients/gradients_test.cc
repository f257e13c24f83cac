// Gradients as a user meets them, besides one Backward a step of dense ones:
// micro-batches that stay on their rank, ranks with unequal data, sparse and
// complex gradients, parameters that are unfrozen.
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/oracle.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kSomeParameter[] = "blocks.1.up.weight";

class GradientsTest : public ::testing::TestWithParam<int> {
 protected:
  GradientsTest() { spec_.stage = GetParam(); }
  std::vector<std::string> Run(absl::string_view function) {
    return RunOnRanks(2, function, spec_.ToText());
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, GradientsTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// ---- NoSyncScope

// Four micro-batches a step, of which the last alone is reduced. Scopes may be
// nested.
TESSERA_RANK_FUNCTION(TrainWithNoSync) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  for (int step = 0; step < spec.steps; ++step) {
    {
      Engine::NoSyncScope outer(t.engine.get());
      for (int i = 0; i < 3; ++i) {
        Engine::NoSyncScope inner(t.engine.get());
        TESSERA_RETURN_IF_ERROR(t.Backward(4 * step + i));
        if (spec.accumulation > 1) TESSERA_RETURN_IF_ERROR(t.engine->Step());
      }
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(4 * step + 3));
    if (t.engine->step() == step + 1) continue;
    return absl::InternalError(absl::StrCat("step() is ", t.engine->step()));
  }
  return t.Finish();
}

TEST_P(GradientsTest, NoSyncIsLocalAccumulation) {
  int cell = GetParam();
  for (const char* model : {"Gpt", "ChangingRank", "SparseEmbedding"}) {
    ++cell;
    for (const char* dtype : {"fp32", "bf16"}) {
      spec_.model = model;
      spec_.dtype = dtype;
      spec_.accumulation = 4;
      TrainingSpec of_oracle = spec_;
      of_oracle.accumulation_mode = "local";
      for (int world_size : {1, 2, 3}) {
        // Half of the cells, and at the next stage the other half.
        if (++cell % 2 == 0) continue;
        ExpectParameters(
            RunOnRanks(world_size, "TrainWithNoSync", spec_.ToText()),
            of_oracle, world_size, {OwnLoss(), OwnLoss(), OwnLoss()});
      }
    }
  }
}

// Backwards without synchronization count as one micro-batch: nothing is
// divided by their number.
TEST_P(GradientsTest, NoSyncWithinOneMicroBatchAddsUp) {
  TrainingSpec of_oracle = spec_;
  of_oracle.accumulation_mode = "local";
  of_oracle.accumulation = 4;
  const Oracle::Loss four_times = [](torch::nn::Module& module, int rank,
                                     int64_t micro_batch) {
    return OwnLoss()(module, rank, micro_batch) * 4;  // exact
  };
  ExpectParameters(Run("TrainWithNoSync"), of_oracle, 2,
                   {four_times, four_times, four_times});
}

TESSERA_RANK_FUNCTION(StepWithinNoSync) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  std::string errors;
  {
    Engine::NoSyncScope no_sync(t.engine.get());
    TESSERA_RETURN_IF_ERROR(t.Backward(0));
    absl::StrAppend(&errors, t.engine->Step().ToString());
  }
  absl::StrAppend(&errors, "; ", t.engine->Step().ToString());
  // Existing gradients are not lost.
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(errors, "\n", parameters);
}

TEST_P(GradientsTest, StepNeedsGradientsThatAreReduced) {
  std::vector<std::string> answers = Run("StepWithinNoSync");
  EXPECT_THAT(TakeFirstLines(&answers),
              Each(AllOf(StartsWith("FAILED_PRECONDITION: Step: within an "
                                    "Engine::NoSyncScope"),
                         HasSubstr("; FAILED_PRECONDITION: parameter '"),
                         HasSubstr("call Backward once more"))));
  TrainingSpec of_oracle = spec_;
  of_oracle.accumulation = 2;
  of_oracle.accumulation_mode = "local";
  const Oracle::Loss twice = [](torch::nn::Module& module, int rank,
                                int64_t micro_batch) {
    return OwnLoss()(module, rank, micro_batch) * 2;
  };
  ExpectParameters(answers, of_oracle, 2, {twice});
}

// Rank 1's backward throws in a hook, within the scope.
TESSERA_RANK_FUNCTION(ErrorWithinNoSync) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  std::string errors;
  {
    Engine::NoSyncScope no_sync(t.engine.get());
    TESSERA_RETURN_IF_ERROR(t.Backward(7));
    at::Tensor parameter = t.parameter(kSomeParameter);
    unsigned hook = 0;
    if (t.rank == 1) {
      hook = parameter.register_hook([](at::Tensor) -> at::Tensor {
        throw std::runtime_error("out of paper");
      });
    }
    absl::StrAppend(&errors, t.Backward(8).ToString());
    if (t.rank == 1) parameter.remove_hook(hook);
  }
  const absl::Status forward = CatchTorch("forward", [&] {
    at::Tensor loss = t.Loss(9);
    absl::StrAppend(&errors, "; ", t.engine->Backward(loss).ToString());
  });
  if (!forward.ok()) return absl::StrCat(errors, "; ", forward.ToString());
  // All of it is gone, and the engine goes on.
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(errors, "\n", parameters);
}

TEST_P(GradientsTest, AnErrorWithinNoSyncFailsTheNextReductionOnAllRanks) {
  if (GetParam() == 3) return;  // below
  std::vector<std::string> answers = Run("ErrorWithinNoSync");
  const std::vector<std::string> errors = TakeFirstLines(&answers);
  EXPECT_THAT(errors[0], AllOf(StartsWith("OK; "), HasSubstr("rank 1 failed"),
                               HasSubstr("out of paper")));
  EXPECT_THAT(errors[1],
              AllOf(HasSubstr("out of paper; "), HasSubstr("out of paper")));
  ExpectParameters(answers, spec_, 2, {LossOf(0)});
}

// There rank 0 may wait in a gather that rank 1 will not join.
TEST(GradientsStage3Test, AnErrorWithinNoSyncEndsBothInTime) {
  TrainingSpec spec;
  spec.stage = 3;
  const std::vector<std::string> errors =
      RunOnRanks(2, "ErrorWithinNoSync", spec.ToText(), absl::Seconds(15));
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"), HasSubstr("out of paper")));
  EXPECT_THAT(errors[1], HasSubstr("out of paper"));
}

// ---- ranks with unequal data

// A rank has so many micro-batches, and so many samples in each.
int64_t BatchesOf(int rank) { return rank == 0 ? 6 : rank == 1 ? 2 : 0; }
double SamplesOf(int rank, int64_t micro_batch) {
  if (micro_batch >= BatchesOf(rank)) return 0;
  return static_cast<double>(3 + 4 * rank + micro_batch % 3);
}

// A rank without data takes part with what there is: values that would harm.
TESSERA_RANK_FUNCTION(TrainOnUnequalData) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  int64_t batch = 0;
  for (;; ++batch) {
    const double samples = SamplesOf(t.rank, batch);
    TESSERA_ASSIGN_OR_RETURN(const bool more,
                             t.engine->AnyRankHasData(samples > 0));
    if (!more) break;
    at::Tensor loss = t.Loss(batch);
    if (samples == 0) loss = loss * std::numeric_limits<double>::quiet_NaN();
    BackwardOptions options;
    options.weight = samples;
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss, options));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  if (batch != BatchesOf(0)) return absl::InternalError("left too early");
  return t.Finish();
}

// Each stage runs half of the cells, which have every three of their values.
TEST_P(GradientsTest, UnequalDataGivesTheMeanOverAllSamples) {
  int turn = GetParam();
  for (const char* model : {"Gpt", "SparseEmbedding", "Complex"}) {
    ++turn;
    for (int accumulation : {1, 3}) {
      for (const bool local : {false, true}) {
        const int sum = turn + accumulation / 2 + (local ? 1 : 0);
        for (int world_size : {2, 3}) {
          if ((sum + world_size) % 2 != 0) continue;
          spec_.model = model;
          spec_.accumulation = accumulation;
          spec_.accumulation_mode = local ? "local" : "each";
          SCOPED_TRACE(spec_.ToText());
          OracleOptions options = OracleOptionsOf(spec_, world_size);
          options.weight = SamplesOf;
          Oracle oracle([&] { return MakeTestModel(model); }, options);
          for (int step = 0; step < 6 / accumulation; ++step) {
            oracle.TrainStep(
                [](torch::nn::Module& module, int rank, int64_t micro_batch) {
                  return SamplesOf(rank, micro_batch) > 0
                             ? OwnLoss()(module, rank, micro_batch)
                             : at::Tensor();
                });
          }
          ExpectParameters(
              RunOnRanks(world_size, "TrainOnUnequalData", spec_.ToText()),
              oracle);
        }
      }
    }
  }
}

// First only rank 1 passes a weight, and then only one micro-batch of two has
// one.
TESSERA_RANK_FUNCTION(SomeWeights) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  BackwardOptions weighted;
  weighted.weight = 2;
  std::string errors =
      t.Backward(7, t.rank == 1 ? weighted : BackwardOptions()).ToString();
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  absl::StrAppend(&errors, "; ", t.Backward(8, weighted).ToString());
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(errors, "\n", parameters);
}

TEST_P(GradientsTest, WeightsAreGivenByAllRanksOrNone) {
  std::vector<std::string> answers = Run("SomeWeights");
  EXPECT_THAT(
      TakeFirstLines(&answers),
      Each(AllOf(HasSubstr("rank 1 gave a weight and rank 0 gave none; all "
                           "ranks must do the same"),
                 HasSubstr("some micro-batches of this step have a weight and "
                           "some have none"))));
  ExpectParameters(answers, spec_, 2, {LossOf(0)});
}

// ---- kinds of gradients

TEST_P(GradientsTest, SparseAndComplexOnes) {
  spec_.gradients = true;
  spec_.accumulation = 2;
  spec_.clipping = 0.5;
  spec_.outcomes = true;
  // Half of the cells, with every four of the values of a cell.
  for (int i = 0; i < 16; ++i) {
    const int m = i % 2, d = i / 2 % 2, r = i / 4 % 2, a = i / 8;
    spec_.model = m == 0 ? "SparseEmbedding" : "Complex";
    spec_.dtype = d == 0 ? "fp32" : "bf16";
    spec_.reduce_dtype = r == 0 ? "" : "bf16";
    spec_.accumulation_mode = a == 0 ? "each" : "local";
    ExpectEqualsOracle(spec_, (m + d + r + a + GetParam()) % 2 == 0 ? 2 : 3);
  }
}

// ---- parameters that are unfrozen

// As long as a parameter is frozen it has no master: what is frozen has values
// here that 16 bits can hold.
std::shared_ptr<TestModel> MakeThawed() {
  auto model = MakeTestModel("Thawed");
  torch::NoGradGuard no_grad;
  for (at::Tensor& p : model->parameters()) {
    p.copy_(p.to(torch::kBFloat16));
  }
  return model;
}

// "<bytes of the optimizer before> <after>" and the parameters.
TESSERA_RANK_FUNCTION(TrainThawed) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(TrainingSpec::kModelSeed);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(MakeThawed(), ConfigOf(spec), world.communicator()));
  const int64_t before = t.engine->state_bytes().optimizer;
  for (int step = 0; step < spec.steps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  const int64_t after = t.engine->state_bytes().optimizer;
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(before, " ", after, "\n", parameters);
}

TEST_P(GradientsTest, AnUnfrozenParameterGetsItsOptimizerState) {
  spec_.model = "Thawed";
  spec_.steps = 4;
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    spec_.dtype = dtype;
    std::vector<std::string> answers = Run("TrainThawed");
    for (const std::string& line : TakeFirstLines(&answers)) {
      const std::vector<std::string> bytes = absl::StrSplit(line, ' ');
      ASSERT_EQ(bytes.size(), 2u) << line;
      EXPECT_LT(std::stoll(bytes[0]), std::stoll(bytes[1]));
    }
    Oracle oracle(MakeThawed, OracleOptionsOf(spec_, 2));
    for (int step = 0; step < spec_.steps; ++step) oracle.TrainStep(OwnLoss());
    ExpectParameters(answers, oracle);
  }
}

// Only rank 1 trains it: then it has a gradient of that rank's alone.
TESSERA_RANK_FUNCTION(TrainFrozenOnRank0) {
  TESSERA_ASSIGN_OR_RETURN(auto t, [&]() -> absl::StatusOr<Trainee> {
    auto model = BuildModel("Mlp", world.rank());
    if (world.rank() == 0) {
      model->named_parameters()[kSomeParameter].requires_grad_(false);
    }
    return Trainee::Make(model, ConfigOf(TrainingSpec::FromText(args)),
                         world.communicator());
  }());
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TEST_P(GradientsTest, RanksMayDifferInWhatTheyTrain) {
  const Oracle::Loss loss = [](torch::nn::Module& module, int rank,
                               int64_t micro_batch) {
    module.named_parameters()[kSomeParameter].requires_grad_(rank != 0);
    return OwnLoss()(module, rank, micro_batch);
  };
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    ExpectParameters(Run("TrainFrozenOnRank0"), spec_, 2, {loss, loss, loss});
  }
}

}  // namespace
}  // namespace tessera
