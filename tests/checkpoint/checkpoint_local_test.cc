// Each host has a part of the checkpoint in a folder of its own. A host is a
// working folder here: ranks name the same path, and see different folders.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// "<spec>\n<folders of the ranks' hosts, with blanks between>\n<words>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    hosts = absl::StrSplit(lines.at(1), ' ');
    words = absl::StrSplit(lines.at(2), ' ');
  }
  bool Has(const std::string& word) const {
    return std::find(words.begin(), words.end(), word) != words.end();
  }
  TrainingSpec spec;
  std::vector<std::string> hosts;
  std::vector<std::string> words;
};

// While it lives this rank is on that host.
class OnHost {
 public:
  explicit OnHost(const std::string& folder)
      : before_(fs::current_path().string()) {
    fs::create_directories(folder);
    TESSERA_CHECK(chdir(folder.c_str()) == 0) << folder;
  }
  ~OnHost() { TESSERA_CHECK(chdir(before_.c_str()) == 0) << before_; }

 private:
  const std::string before_;
};

absl::StatusOr<std::unique_ptr<Engine>> LocalEngine(
    const Args& a, std::shared_ptr<TestModel> model, const World& world) {
  proto::Config config = ConfigOf(a.spec);
  config.mutable_checkpoint()->set_use_node_local_storage(!a.Has("options"));
  config.mutable_checkpoint()->set_replicas(a.Has("replicas"));
  config.mutable_checkpoint()->set_async(a.Has("async"));
  EngineOptions options;
  options.communicator = world.communicator();
  return Engine::Create(std::move(model), config, options);
}

// Trains and saves; returns the error, or the state. "full2": rank 2's disk is
// full; "again": not for a second save, whose error is returned then. "async":
// one step of training runs meanwhile.
TESSERA_RANK_FUNCTION(TrainAndSaveOnHosts) {
  const Args a(args);
  const OnHost host(a.hosts.at(static_cast<size_t>(world.rank())));
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, LocalEngine(a, model, world));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_ASSIGN_OR_RETURN(const std::string state, StateOf(*engine, *model));
  absl::Status saved;
  {
    std::optional<FullDisk> full;
    if (a.Has(absl::StrCat("full", world.rank()))) full.emplace(100);
    saved = engine->SaveCheckpoint("run/ckpt");
    if (a.Has("async")) {
      TrainingSpec more = a.spec;
      ++more.steps;
      TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, more, world.rank(),
                                         a.spec.steps, &record));
      saved.Update(engine->WaitForCheckpoint());
    }
  }
  if (a.Has("again")) {
    if (saved.ok()) return "the first save did not fail";
    saved = engine->SaveCheckpoint("run/ckpt");
  }
  return saved.ok() ? state : saved.ToString();
}

TESSERA_RANK_FUNCTION(LoadOnHosts) {
  const Args a(args);
  const OnHost host(a.hosts.at(static_cast<size_t>(world.rank())));
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine, LocalEngine(a, model, world));
  TESSERA_ASSIGN_OR_RETURN(const std::string before, StateOf(*engine, *model));
  const absl::Status loaded = engine->LoadCheckpoint("run/ckpt").status();
  TESSERA_ASSIGN_OR_RETURN(const std::string state, StateOf(*engine, *model));
  if (loaded.ok()) return state;
  return state == before ? loaded.ToString()
                         : absl::StrCat("changed by ", loaded.ToString());
}

// Makes three saves with a manager that keeps two, the last one twice; returns
// what another manager finds then.
TESSERA_RANK_FUNCTION(ManageOnHosts) {
  const Args a(args);
  const OnHost host(a.hosts.at(static_cast<size_t>(world.rank())));
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, LocalEngine(a, model, world));
  CheckpointManagerOptions options;
  options.dir = "run";
  options.every_steps = 1;
  if (a.Has("options")) options.node_local = true;
  Record record;
  TESSERA_ASSIGN_OR_RETURN(auto manager,
                           CheckpointManager::Create(engine.get(), options));
  const auto train = [&](int from, int until) -> absl::Status {
    for (int step = from; step < until; ++step) {
      TrainingSpec spec = a.spec;
      spec.steps = step + 1;
      TESSERA_RETURN_IF_ERROR(
          TrainSteps(*engine, *model, spec, world.rank(), step, &record));
      TESSERA_RETURN_IF_ERROR(
          manager
              ->MaybeSave([&] { return absl::StrCat("step ", engine->step()); })
              .status());
    }
    return engine->WaitForCheckpoint();
  };
  TESSERA_RETURN_IF_ERROR(train(0, 3));
  TESSERA_ASSIGN_OR_RETURN(auto words, manager->Resume(2));
  TESSERA_RETURN_IF_ERROR(train(2, 3));
  if (a.Has("lose") && world.rank() == 3) {
    fs::remove_all("run/step-00000003");
  }
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("lost"));
  TESSERA_ASSIGN_OR_RETURN(auto last, manager->Resume());
  std::vector<std::string> there;
  for (const auto& entry : fs::directory_iterator("run")) {
    there.push_back(entry.path().filename());
  }
  std::sort(there.begin(), there.end());
  return absl::StrCat(words.value_or("none"), ", ", last.value_or("none"), "; ",
                      absl::StrJoin(there, " "));
}

// Saves a step again after the run went back: the existing one stays if nothing
// can be saved.
TESSERA_RANK_FUNCTION(SaveAgainOnHosts) {
  const Args a(args);
  const OnHost host(a.hosts.at(static_cast<size_t>(world.rank())));
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, LocalEngine(a, model, world));
  CheckpointManagerOptions options;
  options.dir = "run";
  TESSERA_ASSIGN_OR_RETURN(auto manager,
                           CheckpointManager::Create(engine.get(), options));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(manager->Save());
  // Another manager has not seen that it is saved.
  manager.reset();
  TESSERA_ASSIGN_OR_RETURN(manager,
                           CheckpointManager::Create(engine.get(), options));
  std::string said = manager
                         ->Save([&]() -> std::string {
                           if (world.rank() == 3)
                             throw std::runtime_error("no position");
                           return "";
                         })
                         .ToString();
  {
    TESSERA_ASSIGN_OR_RETURN(const auto open,
                             engine->Summon({model->parameters()[0]}));
    absl::StrAppend(&said, "\n", manager->Save().ToString());
  }
  {
    absl::StatusOr<Saving> other = absl::UnknownError("not begun");
    if (world.rank() == 2) {
      other = Saving::Begin("run/step-00000002", FileSystem::Real());
    }
    TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("locked"));
    absl::StrAppend(&said, "\n", manager->Save().ToString());
  }
  TESSERA_ASSIGN_OR_RETURN(const auto words, manager->Resume());
  absl::StrAppend(&said, "\n", words.has_value() ? "there" : "gone");
  manager.reset();
  TESSERA_ASSIGN_OR_RETURN(manager,
                           CheckpointManager::Create(engine.get(), options));
  TESSERA_RETURN_IF_ERROR(manager->Save([] { return "again"; }));
  TESSERA_ASSIGN_OR_RETURN(const auto last, manager->Resume());
  return absl::StrCat(said, "\n", last.value_or("none"));
}

class CheckpointLocalTest : public ::testing::TestWithParam<int> {
 protected:
  CheckpointLocalTest() {
    spec_.model = "Gpt";
    spec_.dtype = "bf16";
    spec_.steps = 2;
    spec_.stage = GetParam();
  }

  // `hosts`: a letter for each rank.
  std::vector<std::string> Run(absl::string_view function,
                               const std::string& hosts,
                               const std::string& words = "") {
    std::vector<std::string> folders;
    for (char host : hosts) folders.push_back(PathOf(host));
    return RunOnRanks(static_cast<int>(hosts.size()), function,
                      absl::StrCat(spec_.ToText(), "\n",
                                   absl::StrJoin(folders, " "), "\n", words));
  }
  std::string PathOf(char host) const { return folder_ / std::string(1, host); }
  // The ends of names: "rank-00001".
  std::vector<std::string> FilesOf(char host) const {
    const auto folder = Folder::Open(absl::StrCat(PathOf(host), "/run/ckpt"),
                                     FileSystem::Real());
    if (!folder.ok()) return {};
    std::vector<std::string> ends;
    const std::vector<std::string> names = folder->Names().value();
    for (const std::string& name : names) {
      ends.push_back(name.substr(name.rfind('.') + 1));
    }
    return ends;
  }

  const TempFolder folder_;
  TrainingSpec spec_;
};

TEST_P(CheckpointLocalTest, EachHostHasWhatItsRanksWrite) {
  const std::vector<std::string> saved = Run("TrainAndSaveOnHosts", "AABB");
  ASSERT_THAT(saved, Each(StartsWith("step 2\n")));
  EXPECT_THAT(FilesOf('A'),
              ElementsAre("rank-00000", "rank-00001", "lock", "manifest"));
  EXPECT_THAT(FilesOf('B'),
              ElementsAre("rank-00002", "rank-00003", "lock", "manifest"));
  EXPECT_THAT(Run("LoadOnHosts", "AABB"), Each(saved[0]));
  if (GetParam() > 0) {  // shards are where they were
    EXPECT_THAT(FilesOf('B'),
                ElementsAre("rank-00002", "rank-00003", "lock", "manifest"));
  }
}

TEST_P(CheckpointLocalTest, WhatAHostLacksComesFromAnother) {
  const std::vector<std::string> saved = Run("TrainAndSaveOnHosts", "AABB");
  ASSERT_THAT(saved, Each(StartsWith("step 2\n")));
  // Hosts are in another order, of another number, or new.
  for (const char* hosts : {"BBAA", "ABA", "CAB", "BCCA", "AB"}) {
    EXPECT_THAT(Run("LoadOnHosts", hosts), Each(saved[0])) << hosts;
  }
}

// A host is killed after another host's commit and before its own.
TEST_P(CheckpointLocalTest, AHostThatHadNotCommittedKeepsItsPart) {
  const std::vector<std::string> saved = Run("TrainAndSaveOnHosts", "AABB");
  const std::string manifest = PathOf('B') + "/run/ckpt/manifest";
  ASSERT_TRUE(fs::remove(manifest));
  EXPECT_THAT(Run("TrainAndSaveOnHosts", "AABB"),
              Each(HasSubstr("save to another folder each time")));
  EXPECT_THAT(FilesOf('B'), ElementsAre("rank-00002", "rank-00003", "lock"));
  EXPECT_THAT(Run("LoadOnHosts", "AABB"), Each(saved[0]));
  EXPECT_TRUE(fs::exists(manifest));
  EXPECT_THAT(Run("LoadOnHosts", "AABB"), Each(saved[0]));
}

TEST_P(CheckpointLocalTest, WhatNoHostHasIsNamed) {
  ASSERT_THAT(Run("TrainAndSaveOnHosts", "AABB"), Each(StartsWith("step 2\n")));
  fs::remove_all(PathOf('B'));
  EXPECT_THAT(
      Run("LoadOnHosts", "AABB"),
      Each(AllOf(StartsWith("DATA_LOSS"), HasSubstr("run/ckpt: no host has "),
                 HasSubstr(".rank-00002"))));
  fs::remove_all(PathOf('A'));
  EXPECT_THAT(Run("LoadOnHosts", "AABB"),
              Each(AllOf(StartsWith("NOT_FOUND"),
                         HasSubstr("no host has a checkpoint there"))));
}

TEST_P(CheckpointLocalTest, ASaveThatFailsOnOneHostLeavesNothing) {
  for (const char* replicas : {"", " replicas"}) {
    for (int rank : {0, 1, 2, 3}) {
      const std::string full = absl::StrCat("full", rank, replicas);
      EXPECT_THAT(Run("TrainAndSaveOnHosts", "AABB", full),
                  Each(AllOf(HasSubstr(absl::StrCat("rank ", rank)),
                             HasSubstr("File too large"))));
      EXPECT_THAT(FilesOf('A'), ElementsAre("lock"));
      EXPECT_THAT(FilesOf('B'), ElementsAre("lock"));
    }
    EXPECT_THAT(Run("TrainAndSaveOnHosts", "AABB",
                    absl::StrCat("full2 again", replicas)),
                Each(StartsWith("step 2\n")));
    fs::remove_all(PathOf('A'));
    fs::remove_all(PathOf('B'));
  }
}

TEST_P(CheckpointLocalTest, ReplicasOutlastAHost) {
  for (const char* how : {"replicas", "replicas async"}) {
    const std::vector<std::string> saved =
        Run("TrainAndSaveOnHosts", "AABBC", how);
    ASSERT_THAT(saved, Each(StartsWith("step 2\n")));
    // Each host has its own files and those of the host before.
    EXPECT_THAT(FilesOf('A'), ElementsAre("rank-00000", "rank-00001",
                                          "rank-00004", "lock", "manifest"));
    EXPECT_THAT(FilesOf('C'), ElementsAre("rank-00002", "rank-00003",
                                          "rank-00004", "lock", "manifest"));
    for (char lost : {'A', 'B', 'C'}) {
      const std::string copy = absl::StrCat(PathOf(lost), "copy");
      fs::rename(PathOf(lost), copy);
      EXPECT_THAT(Run("LoadOnHosts", "AABBC"), Each(saved[0])) << lost;
      fs::remove_all(PathOf(lost));
      fs::rename(copy, PathOf(lost));
    }
    fs::remove_all(PathOf('A'));
    fs::remove_all(PathOf('B'));
    // At stage 0 the loads above have brought all files to C.
    EXPECT_THAT(Run("LoadOnHosts", "AABBC"),
                Each(HasSubstr(GetParam() == 0 ? "step 2\n" : "no host has ")));
    // Where a load brought all files, the host has them.
    for (char host : {'A', 'B', 'C'}) fs::remove_all(PathOf(host));
  }
}

// There is no next host.
TEST_P(CheckpointLocalTest, OneHostHasNoReplicas) {
  const std::vector<std::string> saved =
      Run("TrainAndSaveOnHosts", "AA", "replicas");
  ASSERT_THAT(saved, Each(StartsWith("step 2\n")));
  EXPECT_THAT(Run("LoadOnHosts", "AAA"), Each(saved[0]));
}

TEST_P(CheckpointLocalTest, NoneTakesAnothersPlace) {
  const std::vector<std::string> saved = Run("TrainAndSaveOnHosts", "AABB");
  spec_.steps = 3;
  EXPECT_THAT(Run("TrainAndSaveOnHosts", "AABB"),
              Each(AllOf(StartsWith("FAILED_PRECONDITION"),
                         HasSubstr("save to another folder each time"))));
  EXPECT_THAT(Run("LoadOnHosts", "AABB"), Each(saved[0]));
  ASSERT_THAT(Run("TrainAndSaveOnHosts", "CC"), Each(StartsWith("step 3\n")));
  EXPECT_THAT(
      Run("LoadOnHosts", "ACB"),
      Each(AllOf(StartsWith("FAILED_PRECONDITION"),
                 HasSubstr("ranks 0 and 1 see different checkpoints"))));
}

TEST_P(CheckpointLocalTest, AManagerKeepsTheLastOnAllHosts) {
  for (const char* how : {"", "options"}) {
    EXPECT_THAT(Run("ManageOnHosts", "AABB", how),
                Each("step 2, step 3; job.lock latest step-00000002 "
                     "step-00000003"));
    fs::remove_all(PathOf('A'));
    fs::remove_all(PathOf('B'));
  }
}

TEST_P(CheckpointLocalTest, AManagerRemovesNothingBeforeItCanSave) {
  EXPECT_THAT(
      Run("SaveAgainOnHosts", "AABB"),
      Each(AllOf(HasSubstr("rank 3: client_state: no position\n"),
                 HasSubstr("\nFAILED_PRECONDITION"), HasSubstr("\nUNAVAILABLE"),
                 EndsWith("\nthere\nagain"))));
}

TEST_P(CheckpointLocalTest, AManagerGoesBackWhereAHostHasLostOne) {
  const std::vector<std::string> found = Run("ManageOnHosts", "AABB", "lose");
  EXPECT_THAT(found, Each(StartsWith("step 2, step 2; ")));
  EXPECT_THAT(found[0], EndsWith("step-00000003"));
}

INSTANTIATE_TEST_SUITE_P(Stages, CheckpointLocalTest, ::testing::Values(0, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
