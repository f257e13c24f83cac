// A checkpoint has whole parameters, whatever ranks divide them: it is loaded
// over any others, and safetensors files are too.
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
      const auto values = engine.OptimizerStateOf(p.key(), state);
      absl::StrAppend(&text, " ",
                      values.ok() ? PrintOf(*values) : std::string("none"));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// args: "<folder> <spec>".
absl::StatusOr<Trainee> TraineeOf(absl::string_view args, const World& world,
                                  std::string* folder, TrainingSpec* spec) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  *folder = words[0];
  *spec = TrainingSpec::FromText(words[1]);
  return Trainee::Make(*spec, world.communicator());
}

TESSERA_RANK_FUNCTION(TrainAndSave) {
  std::string folder;
  TrainingSpec spec;
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world, &folder, &spec));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, spec, t.rank, /*first=*/0, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(folder));
  TESSERA_RETURN_IF_ERROR(t.engine->SaveSafetensors(folder + ".safetensors"));
  TESSERA_ASSIGN_OR_RETURN(std::string states, StatesOf(*t.engine, *t.model));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return states;
}

TESSERA_RANK_FUNCTION(Load) {
  std::string folder;
  TrainingSpec spec;
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world, &folder, &spec));
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(folder).status());
  TESSERA_ASSIGN_OR_RETURN(std::string states, StatesOf(*t.engine, *t.model));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return states;
}

// The masters that safetensors files give are those of the checkpoint.
TESSERA_RANK_FUNCTION(LoadBoth) {
  std::string folder;
  TrainingSpec spec;
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world, &folder, &spec));
  TESSERA_RETURN_IF_ERROR(
      t.engine->LoadSafetensors(folder + ".safetensors").status());
  TESSERA_ASSIGN_OR_RETURN(const auto given, t.engine->FullStateDict());
  LoadCheckpointOptions options;
  options.model_only = true;
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(folder, options).status());
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

// Whole values that are set by name come back.
TESSERA_RANK_FUNCTION(SetByName) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.Backward(1));
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

TEST(TensorValuesTest, ComeBackWholeAsTheyWereSet) {
  EXPECT_THAT(RunOnRanks(4, "SetByName", "model=Gpt tensor=2 stage=2"),
              Each(""));
  EXPECT_THAT(RunOnRanks(2, "SetByName", "model=Gpt tensor=2 stage=3 cuts=1"),
              Each(""));
  EXPECT_THAT(RunOnRanks(2, "SetByName", "model=Gpt sequence=2 stage=3"),
              Each(""));
}

class TensorCheckpointTest : public ::testing::Test {
 protected:
  std::vector<std::string> On(const Job& run, const char* function) {
    return RunOnRanks(run.world_size, function,
                      absl::StrCat(folder_.path(), "/saved ", run.spec));
  }
  TempFolder folder_;
};

TEST_F(TensorCheckpointTest, LoadsOverAnyOtherParts) {
  const Job saver = {4, "model=Gpt tensor=2 stage=3"};
  const std::string saved = On(saver, "TrainAndSave")[0];
  ASSERT_THAT(saved, testing::HasSubstr("Float"));
  for (const Job& loader : {
           saver,
           Job{2, "model=Gpt tensor=2 stage=1 cuts=1"},
           Job{2, "model=Gpt stage=3"},
           Job{4, "model=Gpt tensor=4 stage=0 cuts=2"},
           Job{4, "model=Gpt sequence=2 stage=3"},
       }) {
    EXPECT_THAT(On(loader, "Load"), Each(saved)) << loader.spec;
  }
  EXPECT_THAT(On({2, "model=Gpt tensor=2 stage=2 cuts=2"}, "LoadBoth"),
              Each(""));
}

TEST_F(TensorCheckpointTest, PartsComeFromAWholeRun) {
  const std::string saved =
      On({2, "model=Attention dtype=bf16 stage=2"}, "TrainAndSave")[0];
  EXPECT_THAT(On({2, "model=Attention dtype=bf16 tensor=2 stage=3"}, "Load"),
              Each(saved));
  EXPECT_THAT(
      On({3, "model=Attention dtype=bf16 tensor=3 stage=0 cuts=1"}, "LoadBoth"),
      Each(""));
}

TEST_F(TensorCheckpointTest, RanksOfASequenceSaveAsOthers) {
  const std::string saved =
      On({4, "model=Gpt dtype=bf16 sequence=2 stage=3"}, "TrainAndSave")[0];
  for (const Job& loader : {
           Job{2, "model=Gpt dtype=bf16 sequence=2 stage=0"},
           Job{3, "model=Gpt dtype=bf16 stage=2"},
           Job{2, "model=Gpt dtype=bf16 tensor=2 stage=3"},
       }) {
    EXPECT_THAT(On(loader, "Load"), Each(saved)) << loader.spec;
  }
  EXPECT_THAT(On({2, "model=Gpt dtype=bf16 sequence=2 stage=3"}, "LoadBoth"),
              Each(""));
}

TEST_F(TensorCheckpointTest, RanksOfASequenceSaveTheirStatesOnce) {
  const std::string saved =
      On({2, "model=Gpt sequence=2 stage=0"}, "TrainAndSave")[0];
  EXPECT_THAT(On({2, "model=Gpt stage=2"}, "Load"), Each(saved));
}

}  // namespace
}  // namespace tessera
