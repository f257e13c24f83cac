// Saves and loads of two ranks at whose calls to the file system one rank is
// refused something, each call in turn: all ranks are told, the old checkpoint
// loads, and the next save ends well and leaves its own files alone. Of the
// calls a part; with TESSERA_TEST_CALLS=all each one.
#include <errno.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/env.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/failure/killing_calls.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int kErrors[] = {ENOSPC, EIO, EMFILE, EINTR, kShortCall};

// One way of saving and loading; every `stride`th call is refused.
struct Way {
  int stage = 3;
  bool async = false;
  bool local = false;
  int stride = 1;

  std::string ToText() const {
    return absl::StrCat(stage, " ", async, " ", local, " ", stride);
  }
  static Way FromText(absl::string_view text) {
    Way way;
    const std::vector<std::string> words = absl::StrSplit(text, ' ');
    TESSERA_CHECK(absl::SimpleAtoi(words.at(0), &way.stage) &&
                  absl::SimpleAtoi(words.at(3), &way.stride));
    way.async = words.at(1) == "1";
    way.local = words.at(2) == "1";
    return way;
  }
};

// A rank, with its engine, that meets faults. What it finds wrong it notes.
class Rank {
 public:
  Rank(const World& world, const Way& way, const std::string& root)
      : world_(world), way_(way), root_(root) {}

  absl::Status Begin() {
    model_ = BuildModel("Mlp", world_.rank());
    spec_.stage = way_.stage;
    proto::Config config = ConfigOf(spec_);
    config.mutable_checkpoint()->set_use_node_local_storage(way_.local);
    config.mutable_checkpoint()->set_replicas(way_.local && way_.async);
    EngineOptions options;
    options.communicator = world_.communicator();
    TESSERA_ASSIGN_OR_RETURN(engine_, Engine::Create(model_, config, options));
    TESSERA_RETURN_IF_ERROR(Train());
    return Save(OldDir());
  }

  // Refuses each call of a save, rank by rank.
  absl::Status FailSaves() {
    return EachCall([this](const CallFault& fault, int victim, bool* fired) {
      return FailSave(fault, victim, fired);
    });
  }
  absl::Status FailLoads() {
    return EachCall([this](const CallFault& fault, int victim, bool* fired) {
      return FailLoad(fault, victim, fired);
    });
  }
  // "<n> fired", and what was wrong.
  std::string Found() const { return absl::StrCat(fired_, " fired\n", wrong_); }

 private:
  template <class Meet>
  absl::Status EachCall(const Meet& meet) {
    int64_t first = 0;
    for (int victim = 0; victim < kRanks; ++victim) {
      // As many as it made when none was refused.
      int64_t calls = std::numeric_limits<int64_t>::max();
      for (int error : kErrors) {
        bool fired = true;
        first = (first + 3) % way_.stride;  // other calls for each error
        for (int64_t k = first; fired && k <= calls; k += way_.stride) {
          where_ = absl::StrCat("rank ", victim, " call ", k, ": ",
                                error == kShortCall ? "short" : strerror(error),
                                ": ");
          fired = false;
          TESSERA_RETURN_IF_ERROR(Annotate(
              meet(CallFault{k, error, root_}, victim, &fired), where_));
          fired_ += fired ? 1 : 0;
          calls = fired ? std::max(calls, k + 1) : calls_of_victim_;
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status FailSave(const CallFault& fault, int victim, bool* fired) {
    TESSERA_ASSIGN_OR_RETURN(const std::string old, StateOf(*engine_, *model_));
    TESSERA_RETURN_IF_ERROR(Train());
    TESSERA_ASSIGN_OR_RETURN(const std::string now, StateOf(*engine_, *model_));
    const std::string dir = NewDir();
    CountCalls(world_.rank() == victim ? fault : CallFault{-1, kKill, root_});
    const absl::Status saved = Save(dir);
    TESSERA_RETURN_IF_ERROR(Judge(fault, victim, saved, fired));
    // What is loaded is what the ranks were told.
    TESSERA_RETURN_IF_ERROR(Annotate(
        engine_->LoadCheckpoint(saved.ok() ? dir : OldDir()).status(), "load"));
    TESSERA_ASSIGN_OR_RETURN(std::string loaded, StateOf(*engine_, *model_));
    const bool may_be_there =
        absl::StrContains(saved.message(), "may be in place already");
    Expect(
        loaded == (saved.ok() ? now : old) || (may_be_there && loaded == now),
        "another state is loaded");
    // With node-local storage none takes the place of one that is there.
    if (!way_.local || !saved.ok()) {
      TESSERA_RETURN_IF_ERROR(Annotate(Save(dir), "the next save"));
    }
    ExpectOwnFiles(dir);
    return MoveOn(dir);
  }

  absl::Status FailLoad(const CallFault& fault, int victim, bool* fired) {
    TESSERA_ASSIGN_OR_RETURN(const std::string old, StateOf(*engine_, *model_));
    TESSERA_RETURN_IF_ERROR(Train());
    TESSERA_ASSIGN_OR_RETURN(const std::string now, StateOf(*engine_, *model_));
    if (way_.local) {  // it has to come from there again
      TESSERA_ASSIGN_OR_RETURN(
          const CheckpointReader reader,
          CheckpointReader::Open(OldDir(), FileSystem::Real()));
      TESSERA_RETURN_IF_ERROR(reader.folder().Remove(OtherFile(reader)));
    }
    CountCalls(world_.rank() == victim ? fault : CallFault{-1, kKill, root_});
    const absl::Status loaded = engine_->LoadCheckpoint(OldDir()).status();
    TESSERA_RETURN_IF_ERROR(Judge(fault, victim, loaded, fired));
    TESSERA_ASSIGN_OR_RETURN(std::string found, StateOf(*engine_, *model_));
    Expect(found == (loaded.ok() ? old : now), "the state has changed");
    if (loaded.ok()) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(
        Annotate(engine_->LoadCheckpoint(OldDir()).status(), "the next load"));
    TESSERA_ASSIGN_OR_RETURN(found, StateOf(*engine_, *model_));
    Expect(found == old, "another state is loaded");
    return absl::OkStatus();
  }

  // Whether the fault came, and that all ranks were told the same of it.
  absl::Status Judge(const CallFault& fault, int victim,
                     const absl::Status& status, bool* fired) {
    const int64_t calls = StopCountingCalls();
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        world_.communicator()->AllGatherStrings(
            absl::StrCat(calls, "\n", status.ToString()), {"how it ended"}));
    const std::vector<std::string> victims = absl::StrSplit(all[victim], '\n');
    int64_t count = 0;
    TESSERA_CHECK(absl::SimpleAtoi(victims[0], &count));
    calls_of_victim_ = count;
    *fired = count > fault.at;
    for (const std::string& one : all) {
      Expect(absl::EndsWith(one, "\nOK") == status.ok(),
             absl::StrCat("ranks were told otherwise: ", one));
    }
    const bool goes_on = fault.error == EINTR || fault.error == kShortCall;
    if (status.ok()) return absl::OkStatus();
    Expect(*fired && !goes_on, status.ToString());
    if (!goes_on) {
      Expect(absl::StrContains(status.message(), strerror(fault.error)),
             status.ToString());
    }
    return absl::OkStatus();
  }

  absl::Status Train() {
    const int step = static_cast<int>(engine_->step());
    spec_.steps = step + 1;
    Record record;
    return TrainSteps(*engine_, *model_, spec_, world_.rank(), step, &record);
  }
  absl::Status Save(const std::string& dir) {
    SaveOptions options;
    options.async = way_.async;
    TESSERA_RETURN_IF_ERROR(engine_->SaveCheckpoint(dir, "", options));
    return engine_->WaitForCheckpoint();
  }
  // Of the manifest there, and its lock.
  void ExpectOwnFiles(const std::string& dir) {
    const auto reader = CheckpointReader::Open(dir, FileSystem::Real());
    if (!reader.ok()) return Expect(false, reader.status().ToString());
    std::set<std::string> expected = {kManifestName, kLockName};
    for (int r = 0; r < kRanks; ++r) {
      // Loading has brought the other host's here, or it is a replica.
      if (way_.local && r != world_.rank()) {
        TESSERA_CHECK(reader->folder().Remove(OtherFile(*reader)).ok());
      } else {
        expected.insert(DataFileName(reader->manifest().id(), r));
      }
    }
    const std::vector<std::string> names = reader->folder().Names().value();
    Expect(std::set<std::string>(names.begin(), names.end()) == expected,
           absl::StrCat("files: ", absl::StrJoin(names, " ")));
  }

  // Of the other rank.
  std::string OtherFile(const CheckpointReader& reader) const {
    return DataFileName(reader.manifest().id(), 1 - world_.rank());
  }

  std::string OldDir() const { return absl::StrCat("run/", round_); }
  std::string NewDir() const {
    return way_.local ? absl::StrCat("run/", round_ + 1) : OldDir();
  }
  // The other ranks have seen it, too.
  absl::Status MoveOn(const std::string& dir) {
    TESSERA_RETURN_IF_ERROR(
        world_.communicator()->AgreeOk(absl::OkStatus(), "seen"));
    if (dir == OldDir()) return absl::OkStatus();
    fs::remove_all(OldDir());
    ++round_;
    return absl::OkStatus();
  }
  void Expect(bool right, const std::string& what) {
    if (!right) absl::StrAppend(&wrong_, where_, what, "\n");
  }

  const World& world_;
  const Way way_;
  const std::string root_;
  TrainingSpec spec_;
  std::shared_ptr<TestModel> model_;
  std::unique_ptr<Engine> engine_;
  int round_ = 0;
  int fired_ = 0;
  int64_t calls_of_victim_ = 0;  // while it was to be refused one
  std::string where_, wrong_;
};

// "<folder>\n<way>\n<saves or loads>". With node-local storage each rank's
// host is a working folder of its own.
TESSERA_RANK_FUNCTION(MeetFaults) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  const Way way = Way::FromText(lines.at(1));
  const std::string host =
      absl::StrCat(lines[0], "/", way.local ? world.rank() : 0);
  fs::create_directories(host);
  const std::string before = fs::current_path().string();
  TESSERA_CHECK(chdir(host.c_str()) == 0);
  absl::StatusOr<std::string> found = std::string();
  {
    Rank rank(world, way, lines[0]);
    absl::Status status = rank.Begin();
    if (status.ok()) {
      status = lines.at(2) == "saves" ? rank.FailSaves() : rank.FailLoads();
    }
    found = status.ok() ? absl::StatusOr<std::string>(rank.Found()) : status;
  }
  TESSERA_CHECK(chdir(before.c_str()) == 0);
  return found;
}

class CheckpointFaultTest : public testing::TestWithParam<bool> {
 protected:
  void Run(Way way, const std::string& what, int least) {
    const TempFolder folder;
    // As /proc names it.
    const std::string root = fs::canonical(folder.path()).string();
    const bool all = EnvString("TESSERA_TEST_CALLS") == "all";
    if (all) way.stride = 1;
    for (auto& answer : RankPool::Get(kRanks)->Run(
             "MeetFaults", absl::StrCat(root, "\n", way.ToText(), "\n", what),
             all ? absl::Minutes(20) : absl::Seconds(60))) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      const std::vector<std::string> lines =
          absl::StrSplit(*answer, absl::MaxSplits('\n', 1));
      int fired = 0;
      ASSERT_TRUE(
          absl::SimpleAtoi(lines[0].substr(0, lines[0].find(' ')), &fired));
      EXPECT_GE(fired, least);
      EXPECT_EQ(lines[1], "");
    }
  }
};

TEST_P(CheckpointFaultTest, Saves) {
  Run({/*stage=*/3, GetParam(), /*local=*/false, /*stride=*/9}, "saves", 15);
}
TEST_P(CheckpointFaultTest, SavesOfEachHostsOwn) {
  Run({/*stage=*/0, GetParam(), /*local=*/true, /*stride=*/9}, "saves", 15);
}
INSTANTIATE_TEST_SUITE_P(Calls, CheckpointFaultTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Async" : "Sync";
                         });

class CheckpointLoadFaultTest : public CheckpointFaultTest {};

TEST_P(CheckpointLoadFaultTest, Loads) {
  Run({GetParam() ? 0 : 3, false, GetParam(), /*stride=*/5}, "loads", 15);
}
INSTANTIATE_TEST_SUITE_P(Folders, CheckpointLoadFaultTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "EachHostsOwn" : "Shared";
                         });

}  // namespace
}  // namespace tessera
