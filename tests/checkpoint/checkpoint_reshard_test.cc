// Checkpoints loaded by another number of ranks than wrote them, at another
// stage, in other units, or by another program: values and optimizer states are
// the saved ones, to the bit.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/disk/crc32c.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// As tools/read_checkpoint.py prints it.
std::string LineOf(const std::string& name, const char* state,
                   const at::Tensor& tensor) {
  const at::Tensor here = tensor.contiguous();
  const absl::string_view bytes(static_cast<const char*>(here.const_data_ptr()),
                                here.nbytes());
  return absl::StrCat(name, " ", state, " ",
                      CheckpointDtype(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] ",
                      absl::Hex(Crc32c(bytes), absl::kZeroPad8));
}

// A line for each master and optimizer state, after the number of the step.
absl::StatusOr<std::string> StateOf(Engine& engine, const TestModel& model) {
  std::string lines = absl::StrCat("step ", engine.step());
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor value, engine.Master(name));
    TESSERA_ASSIGN_OR_RETURN(
        const at::Tensor exp_avg,
        engine.OptimizerStateOf(name, OptimizerState::kExpAvg));
    TESSERA_ASSIGN_OR_RETURN(
        const at::Tensor exp_avg_sq,
        engine.OptimizerStateOf(name, OptimizerState::kExpAvgSq));
    absl::StrAppend(&lines, "\n", LineOf(name, "value", value), "\n",
                    LineOf(name, "exp_avg", exp_avg), "\n",
                    LineOf(name, "exp_avg_sq", exp_avg_sq));
  }
  return lines;
}

TESSERA_RANK_FUNCTION(TrainSaveAndTell) {
  const CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
  return StateOf(*engine, *model);
}

TESSERA_RANK_FUNCTION(LoadAndTell) {
  const CheckpointArgs a(args);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(a.dir).status());
  return StateOf(*engine, *model);
}

// Of the numbers of ranks and stages that the instances do not pair.
TEST_P(CheckpointTest, AnyRanksAndStageLoadIt) {
  spec_.steps = 2;
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (int writers : {1, 2, 3, 4}) {
      const std::string dir = absl::StrCat(dir_, dtype, writers);
      const std::string saved =
          RunOn(writers, "TrainSaveAndTell", spec_, dir)[0];
      ASSERT_THAT(saved, HasSubstr("step 2\n"));
      for (int readers : {1, 2, 3, 4}) {
        for (int stage : {0, 1, 2, 3}) {
          TrainingSpec spec = spec_;
          spec.stage = stage;
          EXPECT_THAT(RunOn(readers, "LoadAndTell", spec, dir), Each(saved))
              << writers << " ranks to " << readers << ", stage " << GetParam()
              << " to " << stage << ", " << dtype;
        }
      }
    }
  }
}

TEST_P(CheckpointTest, AReaderOfTheFormatsPageAlone) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    spec_.steps = 2;
    const std::string saved = RunOn(3, "TrainSaveAndTell", spec_, dir_)[0];
    const std::string command =
        absl::StrCat("/usr/bin/python3 tools/read_checkpoint.py ", dir_);
    FILE* const reader = popen(command.c_str(), "r");
    ASSERT_NE(reader, nullptr);
    std::string text;
    for (int c = fgetc(reader); c != EOF; c = fgetc(reader)) {
      text.push_back(static_cast<char>(c));
    }
    EXPECT_EQ(pclose(reader), 0);
    const std::vector<std::string> read = absl::StrSplit(text, '\n');
    std::vector<std::string> lines = absl::StrSplit(saved, '\n');
    lines.erase(lines.begin());  // the step
    EXPECT_GT(lines.size(), 10u);
    EXPECT_THAT(read, IsSupersetOf(lines));
  }
}

}  // namespace
}  // namespace tessera
