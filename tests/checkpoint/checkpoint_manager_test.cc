// Tests when checkpoints are saved automatically, which are kept, and from
// which a run resumes.
#include "engine/checkpoint_manager.h"

#include <signal.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/run_lock.h"
#include "checkpoint/format/step_folders.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_manager_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TESSERA_RANK_FUNCTION(TrainManaged) {
  const ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_ASSIGN_OR_RETURN(const auto resumed, manager->Resume());
  return Run(trainee, *manager, resumed, a.steps);
}

TEST_F(CheckpointManagerTest, SavesAtMultiplesAndAtTheEndAndGoesOnFromThere) {
  EXPECT_THAT(Train(5), Each("began, ended at 5"));
  EXPECT_THAT(Steps(), ElementsAre(5, 4, 2));
  EXPECT_EQ(Latest(), "step-00000005\n");
  EXPECT_THAT(Train(11), Each("resumed from 5 'after 5', ended at 11"));
  EXPECT_THAT(Steps(), ElementsAre(11, 10, 8, 4));
  EXPECT_EQ(Latest(), "step-00000011\n");
}

TEST_F(CheckpointManagerTest, OneThatIsDamagedIsPassedOverForTheOneBefore) {
  Train(6);
  ASSERT_THAT(Steps(), ElementsAre(6, 4, 2));
  FlipAByteOf(6);
  EXPECT_THAT(Train(5), Each("resumed from 4 'after 4', ended at 5"));
  // 5 was saved last, and 6 is damaged.
  EXPECT_THAT(Train(6), Each("resumed from 5 'after 5', ended at 6"));
  // All are damaged: the run does not silently start from nothing.
  const auto found = ListStepFolders(dir_, FileSystem::Real()).value();
  for (const StepFolder& one : found) {
    fs::resize_file(absl::StrCat(dir_, "/", one.name, "/manifest"), 20);
  }
  EXPECT_THAT(Train(7), Each(HasSubstr("manifest")));
}

// Whatever the damage of the newest step, the run gets past it.
TEST_F(CheckpointManagerTest, NoDamageOfAStepStopsARun) {
  const auto write = [](const std::string& path, size_t at, size_t n) {
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(at))
        .write(std::string(n, '\0').data(), static_cast<std::streamsize>(n));
  };
  struct Case {
    std::string name;
    std::function<void(const std::string& step)> damage;
  };
  const std::vector<Case> cases = {
      {"zeros", [&](const auto& step) { write(step + "/manifest", 0, 512); }},
      {"a byte", [&](const auto& step) { write(step + "/manifest", 3, 1); }},
      {"random",
       [](const auto& step) {
         std::ofstream(step + "/manifest") << "j&%@!~0k\x01\xff something else";
       }},
      {"empty", [](const auto& step) { std::ofstream(step + "/manifest"); }},
      {"a folder",
       [](const auto& step) {
         fs::remove(step + "/manifest");
         fs::create_directories(step + "/manifest/mine");
       }},
      {"a link to nothing",
       [](const auto& step) {
         fs::remove(step + "/manifest");
         fs::create_symlink("/nowhere/manifest", step + "/manifest");
       }},
      {"another format",
       [](const auto& step) {
         const Folder folder = Folder::Open(step, FileSystem::Real()).value();
         auto manifest = ReadManifest(folder).value();
         manifest.set_format_version(99);
         std::ofstream(step + "/manifest", std::ios::binary)
             << EncodeManifest(manifest).value();
       }},
      {"folders for data files, and for the lock",
       [](const auto& step) {
         std::vector<fs::path> paths;
         for (const auto& entry : fs::directory_iterator(step)) {
           if (entry.path().filename() != "manifest") {
             paths.push_back(entry.path());
           }
         }
         for (const fs::path& path : paths) {
           fs::remove(path);
           fs::create_directories(path / "mine");
         }
       }},
      {"a file for the step",
       [](const auto& step) {
         fs::remove_all(step);
         std::ofstream(step) << "mine";
       }},
  };
  Train(6, "\nfew");
  ASSERT_THAT(Steps(), ElementsAre(6, 4));
  const std::string whole = folder_ / "whole";
  fs::rename(dir_, whole);
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    fs::remove_all(dir_);
    fs::copy(whole, dir_, fs::copy_options::recursive);
    one.damage(PathOf(6));
    const std::vector<std::string> ends = Train(6, "\nfew");
    const std::string& told = RankPool::Get(2)->stderr_of(0);
    if (one.name == "another format") {
      // A user who has gone back to an older version is told at once.
      EXPECT_THAT(ends, Each(AllOf(HasSubstr(PathOf(6)),
                                   HasSubstr("format 99; this version"))));
      continue;
    }
    EXPECT_THAT(told, AllOf(HasSubstr("passed over: "), HasSubstr(PathOf(6))));
    EXPECT_THAT(ends, Each("resumed from 4 'after 4', ended at 6"));
    EXPECT_THAT(Train(8, "\nfew"),
                Each("resumed from 6 'after 6', ended at 8"));
    EXPECT_THAT(Steps(), ElementsAre(8, 6));
  }
}

// The second manager is another job's, or one of the same job.
TESSERA_RANK_FUNCTION(TwoInOneFolder) {
  ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      auto first, CheckpointManager::Create(trainee.engine.get(), a.options));
  std::string told = CheckpointManager::Create(trainee.engine.get(), a.options)
                         .status()
                         .ToString();
  // The other job ends when the next manager has found the lock taken.
  first.reset();
  std::thread ends;
  if (world.rank() == 0) {
    TESSERA_ASSIGN_OR_RETURN(RunLock before,
                             RunLock::Take(a.options.dir, FileSystem::Real()));
    const int watch = inotify_init1(IN_CLOEXEC);
    inotify_add_watch(watch, (a.options.dir + "/job.lock").c_str(), IN_CLOSE);
    ends = std::thread(
        [watch, held = std::make_optional(std::move(before))]() mutable {
          char event[4096];
          if (read(watch, event, sizeof(event)) > 0) held.reset();
          close(watch);
        });
  }
  a.options.wait_for_folder = absl::Minutes(10);
  const absl::Status next =
      CheckpointManager::Create(trainee.engine.get(), a.options).status();
  if (ends.joinable()) ends.join();
  TESSERA_RETURN_IF_ERROR(next);
  return told;
}

TEST_F(CheckpointManagerTest, AFolderIsOneJobs) {
  EXPECT_THAT(RunOnRanks(2, "TwoInOneFolder", absl::StrCat(dir_, "\n1")),
              Each(AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("rank 0"),
                         HasSubstr(dir_ + ": process "), HasSubstr(" on host "),
                         HasSubstr("saves its checkpoints there"))));
  // Another process holds the lock.
  const absl::StatusOr<RunLock> held = RunLock::Take(dir_, FileSystem::Real());
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_THAT(Train(2), Each(HasSubstr(absl::StrCat("process ", getpid()))));
}

TEST_F(CheckpointManagerTest, AFolderThatCannotBeLockedIsSaid) {
  fs::create_directories(dir_ + "/job.lock");
  EXPECT_THAT(Train(2), Each("began, ended at 2"));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(0),
              HasSubstr("job.lock: is no regular file; another job that saves "
                        "there would not be noticed"));
}

TEST_F(CheckpointManagerTest, AFolderThatCannotBeMadeIsAnError) {
  EXPECT_THAT(RunOnRanks(2, "TrainManaged", "/proc/no-such-folder\n2"),
              Each(AllOf(HasSubstr("rank 0"),
                         HasSubstr("/proc/no-such-folder: no checkpoint can be "
                                   "saved there"),
                         HasSubstr("No such file or directory"),
                         HasSubstr("checkpoint.folder"))));
}

// The only good checkpoint besides the next one must not be removed to make
// room.
TEST_F(CheckpointManagerTest, OneThatIsPassedOverIsNotCountedAsAGoodOne) {
  Train(6, "\nfew");
  ASSERT_THAT(Steps(), ElementsAre(6, 4));
  FlipAByteOf(6);
  EXPECT_THAT(Train(5, "\nfew"), Each("resumed from 4 'after 4', ended at 5"));
  EXPECT_THAT(Steps(), ElementsAre(5, 4));
}

// A host whose clock is an hour ahead has saved.
TEST_F(CheckpointManagerTest, WhatIsSavedLaterIsNewerWhateverClocksSay) {
  Train(5, "\nfew");
  ASSERT_THAT(Steps(), ElementsAre(5, 4));
  {
    const Folder folder = Folder::Open(PathOf(5), FileSystem::Real()).value();
    auto manifest = ReadManifest(folder).value();
    manifest.set_saved_unix_micros(manifest.saved_unix_micros() +
                                   absl::ToInt64Microseconds(absl::Hours(1)));
    std::ofstream(PathOf(5) + "/manifest", std::ios::binary)
        << EncodeManifest(manifest).value();
  }
  EXPECT_THAT(Train(8, "\nfew"), Each("resumed from 5 'after 5', ended at 8"));
  EXPECT_THAT(Steps(), ElementsAre(8, 6));
  // This run does not look for a checkpoint to resume from.
  RunOnRanks(2, "TrainByTheClock", absl::StrCat(dir_, "\n3"));
  EXPECT_THAT(Steps(), ElementsAre(3, 8, 6));
}

// A full disk gets its room.
TEST_F(CheckpointManagerTest, OldOnesGoAlsoWhereLatestCannotBeWritten) {
  fs::create_directories(dir_ + "/latest.new");
  EXPECT_THAT(Train(6, "\nfew"), Each("began, ended at 6"));
  EXPECT_THAT(Steps(), ElementsAre(6, 4));
}

TESSERA_RANK_FUNCTION(ResumeFromStep) {
  const ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  const absl::Status other = manager->Resume(3).status();
  TESSERA_ASSIGN_OR_RETURN(const auto resumed, manager->Resume(4));
  TESSERA_ASSIGN_OR_RETURN(std::string report,
                           Run(trainee, *manager, resumed, a.steps));
  return absl::StrCat(report, "; ", other.ToString());
}

// The run goes back to an earlier step: what it saves then is the newest,
// whatever its step.
TEST_F(CheckpointManagerTest, GoesBackToAStep) {
  Train(8);
  ASSERT_THAT(Steps(), ElementsAre(8, 6, 4, 2));
  EXPECT_THAT(RunOnRanks(2, "ResumeFromStep", absl::StrCat(dir_, "\n5")),
              Each(AllOf(HasSubstr("resumed from 4 'after 4', ended at 5"),
                         HasSubstr("no checkpoint of step 3"))));
  EXPECT_THAT(Steps(), ElementsAre(5, 8, 6, 4));
  EXPECT_THAT(Train(6), Each("resumed from 5 'after 5', ended at 6"));
}

TESSERA_RANK_FUNCTION(TrainUntilToldToEnd) {
  ManagerArgs a(args);
  a.options.every_steps = 0;
  a.options.async = true;
  struct sigaction before;
  sigaction(SIGUSR1, nullptr, &before);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  {
    TESSERA_ASSIGN_OR_RETURN(
        const auto manager,
        CheckpointManager::Create(trainee.engine.get(), a.options));
    TESSERA_ASSIGN_OR_RETURN(
        const std::string report,
        Run(trainee, *manager, std::nullopt, a.steps, /*signal_at=*/3));
    if (report != "began, told to stop at 3") {
      return absl::InternalError(report);
    }
  }
  // The handler is gone with the manager.
  struct sigaction now;
  sigaction(SIGUSR1, nullptr, &now);
  return now.sa_handler == before.sa_handler ? "as before" : "still caught";
}

TEST_F(CheckpointManagerTest, ASignalOfOneRankSavesAndEndsAll) {
  EXPECT_THAT(RunOnRanks(2, "TrainUntilToldToEnd", absl::StrCat(dir_, "\n9")),
              Each("as before"));
  EXPECT_THAT(Steps(), ElementsAre(3));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(0),
              HasSubstr(absl::StrCat("SIGUSR1 at rank 1: step 3 is saved in ",
                                     dir_, ", and the run ends")));
  EXPECT_THAT(Train(4), Each("resumed from 3 'after 3', ended at 4"));
}

TESSERA_RANK_FUNCTION(ManagerOptionsDiffer) {
  ManagerArgs a(args);
  *a.options.keep_last += world.rank();
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  return CheckpointManager::Create(trainee.engine.get(), a.options)
      .status()
      .ToString();
}

// The folder is relative to the working folder at Create.
TESSERA_RANK_FUNCTION(ChangeTheWorkingFolder) {
  ManagerArgs a(args);
  const fs::path before = fs::current_path();
  const fs::path above = fs::path(a.options.dir).parent_path();
  a.options.dir = "run";
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  fs::current_path(above);
  auto manager = CheckpointManager::Create(trainee.engine.get(), a.options);
  fs::current_path(before);
  TESSERA_RETURN_IF_ERROR(manager.status());
  return Run(trainee, **manager, std::nullopt, a.steps);
}

TEST_F(CheckpointManagerTest, ARelativeFolderIsThatOfCreate) {
  EXPECT_THAT(
      RunOnRanks(2, "ChangeTheWorkingFolder", absl::StrCat(dir_, "\n3")),
      Each("began, ended at 3"));
  EXPECT_THAT(Steps(), ElementsAre(3, 2));
}

TEST_F(CheckpointManagerTest, OptionsThatDifferAreRefused) {
  EXPECT_THAT(RunOnRanks(2, "ManagerOptionsDiffer", absl::StrCat(dir_, "\n1")),
              Each(AllOf(HasSubstr("CheckpointManagerOptions differs"),
                         HasSubstr("keep_last 3"))));
}

}  // namespace
}  // namespace tessera
