// Checkpoints of shard groups: a resumed run is the one that did not stop, in
// the same groups or others.
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/equivalence/shard_groups_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;

// args: "<folder> <spec>".
TESSERA_RANK_FUNCTION(TrainAndSave) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  const TrainingSpec spec = TrainingSpec::FromText(parts[1]);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, spec, t.rank, /*first=*/0, &record));
  TESSERA_RETURN_IF_ERROR(
      t.engine->SaveCheckpoint(parts[0], absl::StrCat("of rank ", t.rank)));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return "";
}

// The engine starts with other values and another generator than were saved.
TESSERA_RANK_FUNCTION(LoadAndTrain) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  const TrainingSpec spec = TrainingSpec::FromText(parts[1]);
  at::set_num_threads(1);
  torch::manual_seed(99);
  auto model = MakeTestModel(spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  const auto client = engine->LoadCheckpoint(parts[0]);
  if (!client.ok()) {
    TESSERA_RETURN_IF_ERROR(engine->Close());
    return client.status().ToString();
  }
  if (client->client_state != absl::StrCat("of rank ", world.rank())) {
    return client->client_state;
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, spec, world.rank(),
                                     static_cast<int>(engine->step()),
                                     &record));
  record.clear();
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return ToText(record);
}

// Each rank's text is the last lines of its record.
void ExpectEnds(const std::vector<Record>& records,
                const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    Record expected = records[rank];
    const Record got = RecordFromText(texts[rank]);
    ASSERT_LT(got.size(), expected.size()) << texts[rank];
    expected.erase(expected.begin(), expected.end() - got.size());
    EXPECT_EQ(FirstDifference(expected, got), "") << "rank " << rank;
  }
}

TEST_P(ShardGroupsTest, AResumedRunIsTheOneThatDidNotStop) {
  const TempFolder folder;
  spec_.model = "Attention";  // dropout: each rank's generator matters
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    spec_.steps = 2;
    const auto run = [&](absl::string_view function) {
      return RunOnRanks(kWorldSize, function,
                        absl::StrCat(folder / "state", " ", spec_.ToText()));
    };
    EXPECT_THAT(run("TrainAndSave"), Each(""));
    // All ranks write, each as much.
    const CheckpointReader reader =
        CheckpointReader::Open(folder / "state", FileSystem::Real()).value();
    std::vector<int64_t> bytes;
    for (const auto& file : reader.manifest().files()) {
      bytes.push_back(file.index_offset());
    }
    std::sort(bytes.begin(), bytes.end());
    ASSERT_EQ(bytes.size(), kWorldSize);
    EXPECT_LT(bytes.back(), 3 * bytes.front());  // pieces begin at pages
    spec_.steps = 4;
    ExpectEnds(TrainWithOracle(spec_, kWorldSize), run("LoadAndTrain"));
  }
}

TEST_P(ShardGroupsTest, CheckpointsOfOtherGroupsAreLoaded) {
  const TempFolder folder;
  const auto run = [&](absl::string_view function) {
    return RunOnRanks(kWorldSize, function,
                      absl::StrCat(folder / "state", " ", spec_.ToText()));
  };
  for (const auto& [saved, loaded] : {std::pair(2, 0), std::pair(0, 1)}) {
    spec_.shard_group = saved;
    const std::vector<Record>& records = TrainWithOracle(spec_, kWorldSize);
    EXPECT_THAT(run("TrainAndSave"), Each(""));
    spec_.shard_group = loaded;
    ExpectEnds(records, run("LoadAndTrain"));
  }
}

}  // namespace
}  // namespace tessera
