// A checkpoint has whole parameters, whatever stages they were at: it is loaded
// over any others, and safetensors files are too; values by name are whole.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;

struct Job {
  int world_size;
  const char* spec;
};

// Prints masters and states of all parameters, whole.
absl::StatusOr<std::string> StatesOf(Engine& engine,
                                     const torch::nn::Module& module) {
  std::string text;
  for (const auto& p : module.named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine.Master(p.key()));
    absl::StrAppend(&text, p.key(), " ", PrintOf(master.to(at::kFloat)));
    for (const char* const state : {"exp_avg", "exp_avg_sq"}) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor values,
                               engine.OptimizerStateOf(p.key(), state));
      absl::StrAppend(&text, " ", PrintOf(values));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// args: "<folder> <spec>". Trains from step `first` to spec.steps.
absl::StatusOr<std::string> TrainFrom(absl::string_view args,
                                      const World& world, int first,
                                      bool save) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  const TrainingSpec spec = TrainingSpec::FromText(words[1]);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  if (first > 0) {
    TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(words[0]).status());
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, spec, t.rank, first, &record));
  if (save) {
    TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(words[0]));
    TESSERA_RETURN_IF_ERROR(
        t.engine->SaveSafetensors(words[0] + ".safetensors"));
  }
  TESSERA_ASSIGN_OR_RETURN(std::string states, StatesOf(*t.engine, *t.model));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return states;
}

TESSERA_RANK_FUNCTION(TrainAndSave) {
  return TrainFrom(args, world, /*first=*/0, /*save=*/true);
}
TESSERA_RANK_FUNCTION(Load) {
  return TrainFrom(args, world, /*first=*/3, /*save=*/false);
}

TESSERA_RANK_FUNCTION(LoadFiles) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(words[1]), world.communicator()));
  TESSERA_RETURN_IF_ERROR(
      t.engine->LoadSafetensors(words[0] + ".safetensors").status());
  TESSERA_ASSIGN_OR_RETURN(const auto given, t.engine->FullStateDict());
  LoadCheckpointOptions options;
  options.model_only = true;
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(words[0], options).status());
  TESSERA_ASSIGN_OR_RETURN(const auto expected, t.engine->FullStateDict());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  std::string differ;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (PrintOf(given[i].second) != PrintOf(expected[i].second)) {
      absl::StrAppend(&differ, expected[i].first, "; ");
    }
  }
  return differ;
}

class PipelineCheckpointTest : public ::testing::Test {
 protected:
  std::vector<std::string> On(const Job& run, const char* function) {
    return RunOnRanks(run.world_size, function,
                      absl::StrCat(folder_.path(), "/saved ", run.spec));
  }
  TempFolder folder_;
};

// Three steps, saved; loaded elsewhere: the same states, and after two more
// steps those of a run that was never saved.
TEST_F(PipelineCheckpointTest, LoadsOverAnyOtherStages) {
  const Job saver = {4, "model=Gpt pipeline=2 stage=3 accumulation=2 steps=3"};
  const std::string saved = On(saver, "TrainAndSave")[0];
  ASSERT_THAT(saved, testing::HasSubstr("Float"));
  for (const Job& loader : {
           saver,
           Job{2, "model=Gpt pipeline=2 stage=1 accumulation=2 steps=3"},
           Job{3, "model=Gpt pipeline=3 stage=0 accumulation=2 steps=3"},
           Job{2, "model=Gpt stage=3 accumulation=2 steps=3"},
           Job{2, "model=Gpt tensor=2 stage=2 accumulation=2 steps=3"},
       }) {
    EXPECT_THAT(On(loader, "Load"), Each(saved)) << loader.spec;
  }
  EXPECT_THAT(On({2, "model=Gpt pipeline=2 stage=2"}, "LoadFiles"), Each(""));
}

TEST_F(PipelineCheckpointTest, GoesOnAsIfItHadNotEnded) {
  const std::string whole =
      On({2, "model=Gpt stage=1 accumulation=2 steps=5"}, "TrainAndSave")[0];
  (void)On({4, "model=Gpt pipeline=2 stage=2 accumulation=2 steps=3"},
           "TrainAndSave");
  EXPECT_THAT(
      On({4, "model=Gpt pipeline=2 stage=3 accumulation=2 steps=5"}, "Load"),
      Each(whole));
}

// Whole values that are set by name come back, on all stages.
TESSERA_RANK_FUNCTION(SetByName) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(
      t.engine->TrainBatch([&](int64_t i) { return t.Loss(i); }).status());
  TESSERA_RETURN_IF_ERROR(
      t.engine->BackwardBatch([&](int64_t i) { return t.Loss(i); }).status());
  std::string wrong;
  for (const auto& p : t.model->named_parameters()) {
    const std::string& name = p.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, t.engine->Master(name));
    const at::Tensor value =
        torch::arange(master.numel(), at::kFloat).view(master.sizes()).div(64);
    TESSERA_RETURN_IF_ERROR(t.engine->SetMaster(name, value));
    TESSERA_RETURN_IF_ERROR(
        t.engine->SetOptimizerState(name, "exp_avg", value + 1));
    TESSERA_RETURN_IF_ERROR(t.engine->SetGradient(name, value + 2));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor now, t.engine->Master(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor state,
                             t.engine->OptimizerStateOf(name, "exp_avg"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                             t.engine->Gradient(name));
    if (!at::equal(now, value) || !at::equal(state, value + 1) ||
        !at::equal(gradient, value + 2)) {
      absl::StrAppend(&wrong, name, "; ");
    }
  }
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return wrong;
}

TEST(PipelineValuesTest, ComeBackWholeAsTheyWereSet) {
  EXPECT_THAT(
      RunOnRanks(4, "SetByName", "model=Gpt pipeline=2 stage=2 accumulation=2"),
      Each(""));
  EXPECT_THAT(
      RunOnRanks(2, "SetByName", "model=Gpt pipeline=2 stage=3 accumulation=2"),
      Each(""));
}

}  // namespace
}  // namespace tessera
