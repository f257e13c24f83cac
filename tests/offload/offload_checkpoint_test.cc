// Checkpoints do not depend on where states and parameters lie, so any way
// saves for any other, and training resumes with the same bits. An async save
// has the values at the call.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The arguments of a rank function: "<how>|<folder>|<TrainingSpec>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> parts =
        absl::StrSplit(text, absl::MaxSplits('|', 2));
    how = parts.at(0);
    dir = parts.at(1);
    spec = TrainingSpec::FromText(parts.at(2));
  }
  std::string how, dir;
  TrainingSpec spec;
};

// Three steps, and a save; the values then.
TESSERA_RANK_FUNCTION(SaveAfterSteps) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 3, &record));
  record.clear();
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(record);
}

// `how` is "" or has the words "model_only", "part" and "trained". Loads into
// another model, perhaps one that has been trained. Returns the values then,
// and the losses and values of what follows.
TESSERA_RANK_FUNCTION(LoadAndGoOn) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           MakeWide(a.spec, world.communicator(), /*seed=*/9));
  Record record;
  if (absl::StrContains(a.how, "trained")) {
    TESSERA_RETURN_IF_ERROR(TrainWide(&t, 10, 12, &record));
    record.clear();
  }
  LoadCheckpointOptions options;
  options.model_only = absl::StrContains(a.how, "model_only");
  if (absl::StrContains(a.how, "part")) {
    options.only = {"blocks.2", "blocks.1.norm", "*.up.weight"};
  }
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(a.dir, options).status());
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 3, 5, &record));
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(record);
}

constexpr OffloadWay kStates = {"States", 1, -1};
constexpr OffloadWay kHalf = {"Half", 0.5, 60'000};
constexpr OffloadWay kWays[] = {kInMemory, kAllOnDisk, kHalf, kStates};

class OffloadCheckpointTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<std::string> Run(int world_size, const char* function,
                               const std::string& how, const std::string& dir,
                               const OffloadWay& way) const {
    return RunOnRanks(
        world_size, function,
        absl::StrCat(how, "|", dir, "|", way.Spec(GetParam()).ToText()));
  }
  static void ExpectSame(const std::vector<std::string>& expected,
                         const std::vector<std::string>& got) {
    ASSERT_THAT(expected, Each(StartsWith("parameter")));
    for (size_t r = 0; r < expected.size(); ++r) {
      const Record one = RecordFromText(expected[r]);
      EXPECT_EQ(FirstDifference(one, RecordFromText(got[r])), "")
          << "rank " << r;
    }
  }
  bool narrow() const { return GetParam() == "bf16"; }
  // The way that saved is of no account, nor that which loads. In all tests
  // every pair of the four occurs: ranks, both ways and dtype.
  void ExpectWays(size_t ranks, int saving, int loading) {
    static const std::vector<Choice> cells = Pairwise({3, 3, 4, 2}, 12);
    const TempFolder folder;
    const std::string dir = folder / "Memory";
    const auto saved = Run(saving, "SaveAfterSteps", "", dir, kInMemory);
    const auto expected = Run(loading, "LoadAndGoOn", "", dir, kInMemory);
    for (const Choice& choice : cells) {
      if (choice[0] != ranks || (choice[3] == 1) != narrow()) continue;
      const OffloadWay &from = kWays[choice[1]], &to = kWays[choice[2]];
      SCOPED_TRACE(absl::StrCat(from.name, " saves, ", to.name, " loads"));
      const std::string of = folder / from.name;
      if (of != dir) {
        ExpectSame(saved, Run(saving, "SaveAfterSteps", "", of, from));
      }
      // With another number of ranks generators stay what they were.
      const char* const before = saving == loading ? "trained" : "";
      ExpectSame(expected, Run(loading, "LoadAndGoOn", before, of, to));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, OffloadCheckpointTest,
                         ::testing::Values("fp32", "bf16"),
                         [](const auto& info) { return info.param; });

TEST_P(OffloadCheckpointTest, AnyWayLoadsWhatAnyOtherSaved) {
  ExpectWays(0, 2, 2);
}
TEST_P(OffloadCheckpointTest, OfTwoRanksOnOne) { ExpectWays(1, 2, 1); }
TEST_P(OffloadCheckpointTest, OfOneRankOnTwo) { ExpectWays(2, 1, 2); }

// Every pair occurs of what is loaded, training before, both ways and dtype.
TEST_P(OffloadCheckpointTest, LoadsTheModelAloneOrAPart) {
  static const std::vector<Choice> cells = Pairwise({3, 2, 2, 3, 2}, 9);
  const char* const what[] = {"model_only", "part", "part model_only"};
  const TempFolder folder;
  Run(2, "SaveAfterSteps", "", folder / kInMemory.name, kInMemory);
  Run(2, "SaveAfterSteps", "", folder / kAllOnDisk.name, kAllOnDisk);
  for (const Choice& choice : cells) {
    if ((choice[4] == 1) != narrow()) continue;
    const std::string how =
        absl::StrCat(what[choice[0]], choice[1] == 1 ? " trained" : "");
    const OffloadWay& to = kWays[1 + choice[3]];
    SCOPED_TRACE(absl::StrCat(to.name, " loads ", how));
    const std::string dir = folder / kWays[choice[2]].name;
    const auto expected = Run(2, "LoadAndGoOn", how, dir, kInMemory);
    ExpectSame(expected, Run(2, "LoadAndGoOn", how, dir, to));
  }
}

// ---- saves beside the training

// The program does this while the checkpoint is written.
absl::Status Meanwhile(const std::string& how, Trainee* t) {
  Record record;
  if (how == "Write") {
    torch::NoGradGuard no_grad;
    for (const at::Tensor& p : t->model->parameters()) p.mul_(2);
  }
  if (how == "Step" || how == "Write") return TrainWide(t, 3, 5, &record);
  if (how == "Read") {  // what is saved, over and over
    while (t->engine->saving_checkpoint()) {
      TESSERA_RETURN_IF_ERROR(AddValues(t, &record));
    }
    return absl::OkStatus();
  }
  if (how == "Close") return t->engine->Close();
  for (const auto& p : t->model->named_parameters()) {
    if (!p.value().requires_grad()) continue;
    const at::Tensor ones = torch::ones(p.value().sizes());
    TESSERA_RETURN_IF_ERROR(
        how == "SetMaster"
            ? t->engine->SetMaster(p.key(), ones)
            : t->engine->SetOptimizerState(p.key(), "exp_avg", ones));
  }
  return absl::OkStatus();
}

// The values at an async save right after a Step, during which the program goes
// on. Ranks' numbers of rounds differ, so "Read" is of one rank alone.
TESSERA_RANK_FUNCTION(SaveAsideAndGoOn) {
  const Args a(args);
  Record record;
  proto::Config config = ConfigOf(a.spec);
  config.mutable_checkpoint()->set_max_bandwidth(8'000'000);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(WideModelOf(world.rank()), config, world.communicator()));
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 3, &record));
  SaveOptions options;
  options.async = true;
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir, "", options));
  const bool goes_on = t.engine->saving_checkpoint();
  TESSERA_RETURN_IF_ERROR(Meanwhile(a.how, &t));
  if (a.how != "Close") {
    TESSERA_RETURN_IF_ERROR(t.engine->WaitForCheckpoint());
  }
  return goes_on ? "beside" : "not beside";
}

TEST_P(OffloadCheckpointTest, AnAsyncSaveHasTheValuesOfItsMoment) {
  const TempFolder folder;
  Run(2, "SaveAfterSteps", "", folder / "whole", kInMemory);
  const auto expected = Run(2, "LoadAndGoOn", "", folder / "whole", kInMemory);
  int turn = narrow() ? 1 : 0;  // in the other dtype each goes the other way
  for (const char* how : {"Step", "Write", "SetMaster", "SetState", "Close"}) {
    const OffloadWay& way = turn++ % 2 == 0 ? kStates : kAllOnDisk;
    SCOPED_TRACE(absl::StrCat(how, " ", way.name));
    const std::string dir = folder / how;
    EXPECT_THAT(Run(2, "SaveAsideAndGoOn", how, dir, way), Each("beside"));
    ExpectSame(expected, Run(2, "LoadAndGoOn", "", dir, kInMemory));
  }
  // On one rank reads need no other.
  Run(1, "SaveAfterSteps", "", folder / "one", kInMemory);
  EXPECT_THAT(Run(1, "SaveAsideAndGoOn", "Read", folder / "read", kAllOnDisk),
              Each("beside"));
  ExpectSame(Run(1, "LoadAndGoOn", "", folder / "one", kInMemory),
             Run(1, "LoadAndGoOn", "", folder / "read", kAllOnDisk));
}

// A write of a unit after a save has ended does not call on_end; the call that
// learns of the end does, and on_end may use units itself.
TESSERA_RANK_FUNCTION(WriteAfterASave) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 3, &record));
  std::string told = "nobody was told";
  SaveOptions options;
  options.async = true;
  options.on_end = [&](const absl::Status& saved) {
    const absl::Status read = t.engine->Parameter("head.weight").status();
    told = absl::StrCat(saved.ToString(), " ", read.ToString());
  };
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir, "", options));
  while (t.engine->saving_checkpoint()) absl::SleepFor(absl::Milliseconds(1));
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("saved"));
  {
    torch::NoGradGuard no_grad;
    t.parameter("head.weight").mul_(2);
  }
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 3, 4, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->WaitForCheckpoint());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return told;
}

TEST_P(OffloadCheckpointTest, AWriteTellsNobodyOfASaveThatHasEnded) {
  const TempFolder folder;
  EXPECT_THAT(Run(2, "WriteAfterASave", "", folder / "saved", kAllOnDisk),
              Each("OK OK"));
}

// ---- loads that are refused

// `how` is "trained", "none" or "". A load fails, and steps follow; with "none"
// there is no load. Returns the error, and the losses and values.
TESSERA_RANK_FUNCTION(LoadIsRefused) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(a.spec, world.communicator()));
  Record record;
  if (absl::StrContains(a.how, "trained")) {
    TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 2, &record));
  }
  std::string said = "none";
  if (!absl::StrContains(a.how, "none")) {
    said = t.engine->LoadCheckpoint(a.dir).status().ToString();
  }
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 2, 4, &record));
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(said, "\n", ToText(record));
}

// Changes a byte of the last state of a rank's file.
void Damage(const std::string& dir, int rank) {
  const auto reader = CheckpointReader::Open(dir, FileSystem::Real());
  if (!reader.ok()) abort();
  std::fstream file(dir + "/" + DataFileName(reader->manifest().id(), rank),
                    std::ios::in | std::ios::out | std::ios::binary);
  const int64_t at = reader->manifest().files(rank).index_offset() - 5000;
  file.seekg(at);
  const char byte = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 1));
  if (!file.flush().good()) abort();
}

TEST_P(OffloadCheckpointTest, ARefusedLoadChangesNothing) {
  const TempFolder folder;
  const std::string dir = folder / "damaged";
  Run(2, "SaveAfterSteps", "", dir, kAllOnDisk);
  Damage(dir, 1);
  for (const std::string state : {"new", "trained"}) {
    auto expected = Run(2, "LoadIsRefused", state + " none", dir, kInMemory);
    TakeFirstLines(&expected);
    for (const OffloadWay& way : {kStates, kAllOnDisk, kHalf}) {
      SCOPED_TRACE(absl::StrCat(way.name, " ", state));
      auto got = Run(2, "LoadIsRefused", state, dir, way);
      EXPECT_THAT(TakeFirstLines(&got), Each(AllOf(StartsWith("DATA_LOSS"),
                                                   HasSubstr("rank-00001"))));
      EXPECT_EQ(got, expected);
    }
  }
}

// Damages the last rank's file before that rank meets the others for the nth
// time.
class DamagingCommunicator : public FakeCommunicator {
 public:
  explicit DamagingCommunicator(std::shared_ptr<Communicator> inner)
      : FakeCommunicator(std::move(inner)) {
    before = [this](const CommCall& call) {
      if (call.op == CollectiveOp::kText && meetings_left-- == 0) {
        if (rank() == world_size() - 1) Damage(dir, rank());
        damaged = true;
      }
      return absl::OkStatus();
    };
  }
  int meetings_left = -1;
  std::string dir;
  bool damaged = false;
};

// `how` is the number of meetings of the load before the damage; -1: nothing is
// damaged, -2: nothing is loaded. Returns the result of the load, and the
// values and losses then.
TESSERA_RANK_FUNCTION(LoadWhileItIsDamaged) {
  const Args a(args);
  auto comm = std::make_shared<DamagingCommunicator>(world.communicator());
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(a.spec, comm));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 1, &record));
  record.clear();
  const int meeting = std::stoi(a.how);
  absl::Status loaded;
  if (meeting > -2) {
    comm->dir = a.dir;
    comm->meetings_left = meeting;
    loaded = t.engine->LoadCheckpoint(a.dir).status();
    comm->meetings_left = -1;
    if (meeting >= 0 && !comm->damaged) return "over";
  }
  absl::Status went_on = AddValues(&t, &record);
  if (went_on.ok()) went_on = TrainWide(&t, 3, 4, &record);
  if (went_on.ok()) went_on = AddValues(&t, &record);
  if (!went_on.ok()) record = {"lost"};
  return absl::StrCat(loaded.ToString(), "\n", ToText(record));
}

// Files that are changed between the two times that what lies on a disk is
// read: nothing is changed, or all of it, or nothing trains on.
TEST_P(OffloadCheckpointTest, AFileThatIsDamagedAtAnyTimeIsNoMixture) {
  const TempFolder folder;
  const std::string dir = folder / "saved", copy = folder / "copy";
  Run(2, "SaveAfterSteps", "", dir, kAllOnDisk);
  const auto load = [&](int meeting, std::vector<std::string>* said) {
    std::filesystem::remove_all(copy);
    std::filesystem::copy(dir, copy);
    auto values =
        Run(2, "LoadWhileItIsDamaged", absl::StrCat(meeting), copy, kAllOnDisk);
    *said = TakeFirstLines(&values);
    return values;
  };
  std::vector<std::string> said;
  const auto all = load(-1, &said), none = load(-2, &said);
  ASSERT_NE(all, none);
  std::set<std::string> became;
  for (int meeting = 0;; ++meeting) {
    SCOPED_TRACE(absl::StrCat("meeting ", meeting));
    const auto values = load(meeting, &said);
    if (said[1] == "over") break;
    became.insert(values == all ? "all" : values == none ? "none" : values[1]);
    EXPECT_THAT(
        said, Each(values == all ? StartsWith("OK") : StartsWith("DATA_LOSS")));
  }
  EXPECT_THAT(became, ElementsAre("all", "lost", "none"));
}

}  // namespace
}  // namespace tessera
