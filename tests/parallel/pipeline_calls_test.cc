// What programs do with an engine whose layers lie on several ranks, and what
// they are told.
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "evaluation/evaluate.h"
#include "evaluation/metric.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

absl::StatusOr<Trainee> TraineeOf(absl::string_view args, const World& world) {
  return Trainee::Make(TrainingSpec::FromText(args), world.communicator());
}

// ---- what is not the stage's

// args: what the forward does, and the spec.
TESSERA_RANK_FUNCTION(LookAtValues) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(words[1], world));
  const auto losses = t.engine->TrainBatch([&](int64_t i) {
    const at::Tensor loss = t.Loss(i);
    if (words[0] == "item") return loss * loss.item<float>();
    if (words[0] == "nonzero") return loss + loss.view({1}).nonzero().sum();
    if (words[0] == "pointer") return loss * loss.data_ptr<float>()[0];
    if (words[0] == "draws") {  // of a tensor that one stage has
      return loss * (1 + torch::bernoulli(loss.detach().sigmoid()));
    }
    return loss;
  });
  return losses.status().ToString();
}

TEST(PipelineRefusals, ValuesThatAreElsewhereAreNamed) {
  EXPECT_THAT(
      RunOnRanks(2, "LookAtValues", "item model=Gpt pipeline=2 accumulation=2"),
      Each(HasSubstr("_local_scalar_dense asks for values that are at "
                     "stage 1 of 2")));
  EXPECT_THAT(RunOnRanks(2, "LookAtValues",
                         "nonzero model=Gpt pipeline=2 accumulation=2"),
              Each(HasSubstr("nonzero asks for values")));
  EXPECT_THAT(RunOnRanks(2, "LookAtValues",
                         "pointer model=Gpt pipeline=2 accumulation=2"),
              Each(HasSubstr("is computed by another stage")));
}

TEST(PipelineCalls, AllStagesDrawTheRandomNumbersOfEach) {
  EXPECT_THAT(RunOnRanks(2, "LookAtValues",
                         "draws model=Gpt pipeline=2 accumulation=2"),
              Each("OK"));
}

TEST(PipelineRefusals, ParametersThatAForwardWritesAreNamed) {
  EXPECT_THAT(RunOnRanks(2, "LookAtValues",
                         "none model=Clamped pipeline=2 accumulation=2"),
              Each(HasSubstr("write it after Engine::Step")));
}

TEST(PipelineRefusals, ValuesAgainstTheDirectionAreNamed) {
  EXPECT_THAT(
      RunOnRanks(2, "LookAtValues",
                 "none model=GradientPenalty pipeline=2 accumulation=2"),
      Each(HasSubstr("set pipeline.schedule to \"gpipe\"")));
}

TESSERA_RANK_FUNCTION(CallBackward) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  const absl::Status status = t.engine->Backward(torch::ones({1}));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return status.ToString();
}

TEST(PipelineRefusals, BackwardIsForBatches) {
  EXPECT_THAT(RunOnRanks(2, "CallBackward", "model=Gpt pipeline=2"),
              Each(HasSubstr("call Engine::TrainBatch")));
}

TEST(PipelineRefusals, NameWhatHasNoStages) {
  struct Refused {
    const char* spec;
    const char* why;
  };
  for (const Refused& refused : {
           Refused{"pipeline=2 optimizer=type:'Adafactor'", "Adafactor"},
           Refused{"pipeline=2 adaptive=0x1p-4", "adaptive_gradient_clipping"},
           Refused{"pipeline=3", "a divisor of the world size 2, got 3"},
           Refused{"pipeline=2 construct_budget=100000", "ConstructSharded"},
           Refused{"pipeline=2 tensor=2", "pipeline.stages"},
           Refused{"pipeline=2 model=SharedStorage", "memory of its own"},
           Refused{"pipeline=2 split=nowhere", "nowhere"},
       }) {
    EXPECT_THAT(RunOnRanks(2, "Train", refused.spec),
                Each(HasSubstr(refused.why)))
        << refused.spec;
  }
}

// ---- ranks that do not do the same

TESSERA_RANK_FUNCTION(OtherSizes) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  const auto losses = t.engine->TrainBatch([&](int64_t i) {
    const at::Tensor loss = t.Loss(i);
    return world.rank() == 0 ? loss : loss.view({1}).sum() * 2;
  });
  return losses.status().ToString();
}

TEST(PipelineRefusals, OtherProgramsEndInAnError) {
  EXPECT_THAT(
      RunOnRanks(2, "OtherSizes", "model=Gpt pipeline=2 accumulation=2"),
      Each(HasSubstr("have run other operators")));
}

// The ranks of one pipeline are to read the same samples.
TESSERA_RANK_FUNCTION(OtherSamples) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  return t.engine
      ->TrainBatch([&](int64_t i) { return t.model->Loss(world.rank(), i); })
      .status()
      .ToString();
}

TEST(PipelineRefusals, OtherSamplesAreTold) {
  EXPECT_THAT(
      RunOnRanks(2, "OtherSamples", "model=Gpt pipeline=2 accumulation=2"),
      Each(HasSubstr("with the same samples")));
}

TESSERA_RANK_FUNCTION(OtherSeeds) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  torch::manual_seed(static_cast<uint64_t>(world.rank()));
  return t.engine->TrainBatch([&](int64_t i) { return t.Loss(i); })
      .status()
      .ToString();
}

TEST(PipelineRefusals, OtherRandomNumbersAreTold) {
  EXPECT_THAT(
      RunOnRanks(2, "OtherSeeds", "model=Gpt pipeline=2 accumulation=2"),
      Each(HasSubstr("have drawn other random numbers")));
}

TESSERA_RANK_FUNCTION(OneStageThrows) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  const auto losses = t.engine->TrainBatch([&](int64_t i) {
    if (i == 1 && world.rank() == 1) throw std::runtime_error("no such file");
    return t.Loss(i);
  });
  return losses.status().ToString();
}

TEST(PipelineFailures, AnErrorOfOneStageIsToldToAll) {
  EXPECT_THAT(
      RunOnRanks(2, "OneStageThrows", "model=Gpt pipeline=2 accumulation=4"),
      Each(HasSubstr("no such file")));
}

// ---- evaluation

TESSERA_RANK_FUNCTION(EvaluateFiveSamples) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  Mean mean("index"), loss("loss");
  const auto add = [&](absl::Span<const int64_t> samples) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor one, t.engine->EvalBatch([&] {
      return t.Loss(samples[0]);
    }));
    loss.Add(one);
    mean.Add(
        torch::tensor(std::vector<int64_t>(samples.begin(), samples.end())));
    return absl::OkStatus();
  };
  EvaluateOptions options;
  options.batch_size = 2;
  TESSERA_RETURN_IF_ERROR(Evaluate(t.engine.get(), {&mean, &loss},
                                   /*num_samples=*/5, add, options));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(mean.value(), " of ", mean.weight(), ", loss ",
                      loss.value());
}

TEST(PipelineCalls, EvaluationCountsEachSampleOnce) {
  const auto expected =
      RunOnRanks(2, "EvaluateFiveSamples", "model=Gpt stage=1");
  EXPECT_THAT(expected, Each(HasSubstr("2 of 5")));
  EXPECT_THAT(
      RunOnRanks(4, "EvaluateFiveSamples", "model=Gpt pipeline=2 stage=1"),
      Each(expected[0]));
}

// ---- what may be done between and within steps

// Returns the masters after some steps, with `what` done meanwhile.
// args: what, and the spec.
TESSERA_RANK_FUNCTION(TrainWith) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  const std::string& what = words[0];
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(words[1], world));
  Engine& engine = *t.engine;
  at::Tensor out = torch::empty({1});
  for (int64_t step = 0; step < 4; ++step) {
    if (what == "freezes" && step == 1) {
      TESSERA_RETURN_IF_ERROR(engine.SetFrozen("first", true));
    }
    if (what == "freezes" && step == 3) {
      TESSERA_RETURN_IF_ERROR(engine.SetFrozen("first", false));
    }
    if (what == "thaws" && step == 2) {
      TESSERA_RETURN_IF_ERROR(engine.SetFrozen("first", false));
    }
    if (what == "evaluates") {  // and is given parameters
      for (const auto& p : t.model->named_parameters()) {
        TESSERA_RETURN_IF_ERROR(
            engine.EvalBatch([&] { return p.value(); }).status());
        TESSERA_RETURN_IF_ERROR(
            engine.EvalBatch([&] { return p.value().view({-1}); }).status());
      }
    }
    TESSERA_RETURN_IF_ERROR(
        engine
            .TrainBatch([&](int64_t i) {
              at::Tensor loss = t.Loss(2 * step + i);
              if (what == "grows") {  // an `out` of other sizes
                at::Tensor detached = loss.detach().expand({3, 5});
                out = torch::empty({1});
                at::mul_out(out, detached, detached);
                loss = loss + out.sum();
              }
              return loss;
            })
            .status());
  }
  std::string masters;
  for (const auto& p : t.model->named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine.Master(p.key()));
    absl::StrAppend(&masters, p.key(), " ", PrintOf(master), "\n");
  }
  TESSERA_RETURN_IF_ERROR(engine.Close());
  return masters;
}

class PipelineStepsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PipelineStepsTest, AreThoseOfOneWithout) {
  const std::string frozen = GetParam() == "thaws" ? "true" : "false";
  const std::string spec =
      absl::StrCat(GetParam(),
                   " model=Gpt accumulation=2 stage=1 "
                   "optimizer=type:'AdamW',params{lr:0.01},"
                   "param_groups{name:'first',parameters:'blocks.0.*',frozen:",
                   frozen, "}");
  const auto expected = RunOnRanks(1, "TrainWith", spec);
  EXPECT_THAT(expected, Each(HasSubstr("Float")));
  EXPECT_THAT(RunOnRanks(2, "TrainWith", absl::StrCat(spec, " pipeline=2")),
              Each(expected[0]));
}

INSTANTIATE_TEST_SUITE_P(All, PipelineStepsTest,
                         ::testing::Values("nothing", "freezes", "thaws",
                                           "evaluates", "grows"),
                         [](const auto& what) { return what.param; });

TESSERA_RANK_FUNCTION(EvaluateWithin) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  return t.engine
      ->TrainBatch([&](int64_t i) -> absl::StatusOr<at::Tensor> {
        TESSERA_ASSIGN_OR_RETURN(
            const at::Tensor scale,
            t.engine->EvalBatch([] { return torch::ones({}); }));
        return t.Loss(i) * scale;
      })
      .status()
      .ToString();
}

TEST(PipelineRefusals, ABatchIsNotWithinAnother) {
  EXPECT_THAT(
      RunOnRanks(2, "EvaluateWithin", "model=Gpt pipeline=2 accumulation=2"),
      Each(HasSubstr("within the forward of another")));
}

// ---- what a step says of itself

TESSERA_RANK_FUNCTION(ReportOfAStep) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  TESSERA_RETURN_IF_ERROR(
      t.engine->TrainBatch([&](int64_t i) { return t.Loss(i); }).status());
  const PipelineReport report = t.engine->last_step().pipeline;
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  if (report.forward <= absl::ZeroDuration() ||
      report.backward <= absl::ZeroDuration() || report.idle_share < 0 ||
      report.idle_share > 1) {
    return "times are missing";
  }
  return absl::StrCat(report.stage, "/", report.stages, " ",
                      report.micro_batches, " ", report.bubble, " ",
                      report.sent_bytes > 0 ? "sent" : "nothing");
}

TEST(PipelineCalls, AStepTellsItsTimes) {
  EXPECT_THAT(
      RunOnRanks(2, "ReportOfAStep", "model=Gpt pipeline=2 accumulation=4"),
      testing::ElementsAre("0/2 4 0.2 sent", "1/2 4 0.2 sent"));
  EXPECT_THAT(RunOnRanks(1, "LookAtValues", "none model=Gpt accumulation=3"),
              Each("OK"));
}

// ---- Verify

TESSERA_RANK_FUNCTION(VerifyStages) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  VerifyOptions options;
  options.engine.communicator = world.communicator();
  options.steps = 2;
  TESSERA_ASSIGN_OR_RETURN(
      const VerifyReport report,
      Verify([&] { return MakeTestModel(spec.model); }, ConfigOf(spec),
             [](torch::nn::Module& module, int rank, int64_t micro_batch) {
               return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
             },
             options));
  return report.ToString();
}

TEST(PipelineCalls, VerifyComparesStages) {
  EXPECT_THAT(RunOnRanks(4, "VerifyStages",
                         "model=Gpt pipeline=2 stage=2 accumulation=3"),
              Each(HasSubstr("the same bits")));
  // Forwards run before a backward, each under autocast.
  EXPECT_THAT(RunOnRanks(2, "VerifyStages",
                         "model=Gpt pipeline=2 stage=1 accumulation=3 "
                         "more=torch_autocast{enabled:true}"),
              Each(HasSubstr("the same bits")));
}

}  // namespace
}  // namespace tessera
