// Checkpoints are loaded by another number of ranks than wrote them, at another
// stage, in other units, or by another program: values and optimizer states are
// the saved ones, and the next step's gradients are the oracle's, to the bit.
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/api/version.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/checkpoint/next_step.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr char kCut[] = "\n--\n";

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

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
  TESSERA_ASSIGN_OR_RETURN(const std::string state, StateOf(*engine, *model));
  // Now it makes the next step.
  torch::manual_seed(TrainingSpec::kRankSeed +
                     static_cast<uint64_t>(world.rank()));
  TrainingSpec next = a.spec;
  next.gradients = true;
  next.steps = static_cast<int>(engine->step()) + 1;
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, next, world.rank(), next.steps - 1, &record));
  return absl::StrCat(state, kCut, ToText(record));
}

// Expects that each rank has the saved state, and in the next step what its
// oracle has.
void ExpectLoaded(const std::vector<std::string>& answers,
                  const std::string& saved,
                  const std::vector<Record>& next_step) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const std::vector<std::string> parts =
        absl::StrSplit(answers[rank], absl::ByString(kCut));
    EXPECT_EQ(parts[0], saved);
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(FirstDifference(next_step[rank], RecordFromText(parts[1])), "")
        << "rank " << rank;
  }
}

// These are the numbers of ranks and stages that the instances do not pair.
TEST_P(CheckpointTest, AnyRanksAndStageLoadIt) {
  spec_.steps = 2;
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (int writers : {1, 2, 3, 4}) {
      const std::string dir = absl::StrCat(dir_, dtype, writers);
      const std::string saved =
          RunOn(writers, "TrainSaveAndTell", spec_, dir)[0];
      ASSERT_THAT(saved, HasSubstr("step 2\n"));
      const auto masters = MastersIn(dir);
      for (int readers : {1, 2, 3, 4}) {
        // A part in which every triple of stages and numbers of ranks occurs,
        // and every pair with both dtypes.
        const int ranks = writers + readers;
        const int turn =
            (writers + GetParam()) / 2 + (writers == readers ? 1 : 0);
        if (turn % 2 != (*dtype == 'b' ? 1 : 0)) continue;
        const auto next = NextStepOfOracle(masters, spec_, readers);
        for (int stage : {0, 1, 2, 3}) {
          if ((ranks + GetParam() + stage) % 4 != 0) continue;
          SCOPED_TRACE(absl::StrCat(writers, " ranks to ", readers, ", stage ",
                                    GetParam(), " to ", stage, ", ", dtype));
          TrainingSpec spec = spec_;
          spec.stage = stage;
          ExpectLoaded(RunOn(readers, "LoadAndTell", spec, dir), saved, next);
        }
      }
    }
  }
}

TEST_P(CheckpointTest, SaysWhatHasSavedIt) {
  spec_.steps = 1;
  RunOn(3, "TrainSaveAndTell", spec_, dir_);
  const proto::CheckpointTraining training = Manifest().training();
  EXPECT_EQ(training.world_size(), 3);
  EXPECT_EQ(training.stage(), GetParam());
  EXPECT_EQ(training.tessera(), kTesseraVersion);
  EXPECT_EQ(training.libtorch(), TORCH_VERSION);
  EXPECT_EQ(training.backend(), "shm");
  const auto config = ParseConfig(training.config(), "saved", 3);
  TESSERA_ASSERT_OK(config);
  EXPECT_EQ(config->zero_optimization().stage(), GetParam());
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
    EXPECT_THAT(text, HasSubstr("rank 2 generator/cpu 5056 "));
  }
}

}  // namespace
}  // namespace tessera
