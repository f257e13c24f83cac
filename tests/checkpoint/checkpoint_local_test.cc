// Each host has a part of the checkpoint in a folder of its own. A host is a
// working folder here: ranks name the same path, and see different folders.
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_local_test_util.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
      // What one of the two stages leaves out the other one runs.
      const int sum = rank + GetParam() + (*replicas == '\0' ? 0 : 1);
      if (sum % 2 != 0) continue;
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
  const char* const ways[] = {"replicas", "replicas async"};
  for (const char* how : ways) {
    const std::vector<std::string> saved =
        Run("TrainAndSaveOnHosts", "AABBC", how);
    ASSERT_THAT(saved, Each(StartsWith("step 2\n")));
    // Each host has its own files and those of the host before.
    EXPECT_THAT(FilesOf('A'), ElementsAre("rank-00000", "rank-00001",
                                          "rank-00004", "lock", "manifest"));
    EXPECT_THAT(FilesOf('C'), ElementsAre("rank-00002", "rank-00003",
                                          "rank-00004", "lock", "manifest"));
    for (char lost : {'A', 'B', 'C'}) {
      // What one of the two stages leaves out the other one runs.
      const int sum = lost - 'A' + GetParam() + (how == ways[0] ? 0 : 1);
      if (sum % 2 != 0) continue;
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

INSTANTIATE_TEST_SUITE_P(Stages, CheckpointLocalTest, ::testing::Values(0, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
