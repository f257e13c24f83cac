// CheckpointManager where each host has a part of a checkpoint: what is kept,
// on all of them.
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_local_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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

}  // namespace
}  // namespace tessera
