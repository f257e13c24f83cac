// Managers whose saves fail, beside other savers.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status.h"
#include "checkpoint/format/step_folders.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
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
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The disk is full when a save is due, and is not at the end.
TESSERA_RANK_FUNCTION(SaveAgainAtTheEnd) {
  ManagerArgs a(args);
  a.options.async = true;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return manager->Save(); }));
  if (a.steps == 2 && trainee.engine->WaitForCheckpoint().ok()) {
    return "WaitForCheckpoint did not tell";
  }
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  return "saved";
}

TEST_F(CheckpointManagerTest, WhatCouldNotBeSavedIsSavedAtTheEnd) {
  EXPECT_THAT(RunOnRanks(2, "SaveAgainAtTheEnd", absl::StrCat(dir_, "\n1")),
              Each("saved"));
  EXPECT_THAT(Steps(), ElementsAre(1));
  fs::remove_all(dir_);
  // The result is the same if the program has been told before.
  EXPECT_THAT(RunOnRanks(2, "SaveAgainAtTheEnd", absl::StrCat(dir_, "\n2")),
              Each("saved"));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

// Two tiers, `dir` and `dir`2, and a save of the program's own.
TESSERA_RANK_FUNCTION(TwoManagers) {
  ManagerArgs a(args);
  a.options.async = true;
  a.options.on_signals = false;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  Engine& engine = *trainee.engine;
  TESSERA_ASSIGN_OR_RETURN(const auto first,
                           CheckpointManager::Create(&engine, a.options));
  a.options.dir += "2";
  TESSERA_ASSIGN_OR_RETURN(const auto second,
                           CheckpointManager::Create(&engine, a.options));
  int called = 0;
  const auto position = [&] { return absl::StrCat(++called); };
  // A failed save is repeated, whoever else saves meanwhile.
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return first->Save(position); }));
  TESSERA_RETURN_IF_ERROR(second->Save());
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  if (called != 2) return absl::StrCat("saved ", called, " times");
  // A successful one is not repeated.
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return second->Save(); }));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(1));
  TESSERA_RETURN_IF_ERROR(first->Save(position));
  engine.SettleCheckpoint();  // the disk is full for the second's alone
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return second->Save(); }));
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  if (called != 3) return absl::StrCat("saved ", called, " times then");
  // The program is told the result of its own save.
  SaveOptions own;
  own.async = true;
  TESSERA_RETURN_IF_ERROR(WithFullDisk(trainee, [&] {
    return engine.SaveCheckpoint(absl::StrCat(a.options.dir, "/own"), "", own);
  }));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(2));
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  TESSERA_RETURN_IF_ERROR(second->Finish());
  return engine.WaitForCheckpoint().ToString();
}

TEST_F(CheckpointManagerTest, ManagersOfOneEngineDoNotTakeEachOthersErrors) {
  EXPECT_THAT(RunOnRanks(2, "TwoManagers", absl::StrCat(dir_, "\n0")),
              Each(AllOf(HasSubstr("2/own"), HasSubstr("File too large"))));
  EXPECT_THAT(Steps(), ElementsAre(3, 2));
}

// ---- disks that are full

// A file system of this thread's alone, on a folder.
class SmallDisk {
 public:
  ~SmallDisk() {
    if (home_ < 0) return;
    (void)setns(home_, CLONE_NEWNS);
    close(home_);
  }
  // Returns false where mounting is not allowed.
  bool Mount(const std::string& dir) {
    dir_ = dir;
    home_ = open("/proc/thread-self/ns/mnt", O_RDONLY | O_CLOEXEC);
    return unshare(CLONE_NEWNS | CLONE_FS) == 0 &&
           mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount("small", dir.c_str(), "tmpfs", 0, "size=64m") == 0;
  }
  void Resize(int64_t bytes) {
    TESSERA_CHECK(mount("small", dir_.c_str(), "tmpfs", MS_REMOUNT,
                        absl::StrCat("size=", bytes).c_str()) == 0);
  }
  void MakeReadOnly() {
    TESSERA_CHECK(mount("small", dir_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY,
                        "size=64m") == 0);
  }
  int64_t Filled() const {
    struct statvfs info = {};
    TESSERA_CHECK(statvfs(dir_.c_str(), &info) == 0);
    return static_cast<int64_t>((info.f_blocks - info.f_bfree) * info.f_frsize);
  }

 private:
  std::string dir_;
  int home_ = -1;
};

constexpr char kMayNot[] = "may not mount";
constexpr int64_t kSmallFiles = 4 * 4096;  // latest, job.lock, ...

// args: "<dir>\n<steps>\n<checkpoints and a half that the disk holds>\n<how>".
// Returns how it ended, the steps that are whole then, and all that is there.
TESSERA_RANK_FUNCTION(TrainOnASmallDisk) {
  const std::vector<std::string> words = absl::StrSplit(args, '\n');
  ManagerArgs a(args);
  const std::string& how = words.at(3);
  a.options.every_steps = 1;
  a.options.keep_every = 0;
  a.options.async = absl::StrContains(how, "async");
  a.options.node_local = absl::StrContains(how, "local");
  if (absl::StrContains(how, "once")) {
    a.options.retry_for = absl::ZeroDuration();
    a.options.keep_last = 1;
  }
  SmallDisk disk;
  if (!disk.Mount(a.options.dir)) return std::string(kMayNot);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  {
    SaveOptions probe;
    probe.node_local = a.options.node_local;
    const std::string path = a.options.dir + "/probe";
    TESSERA_RETURN_IF_ERROR(trainee.engine->SaveCheckpoint(path, "x", probe));
    const int64_t one = disk.Filled();
    fs::remove_all(path);
    int64_t room = 0;
    TESSERA_CHECK(absl::SimpleAtoi(words.at(2), &room));
    disk.Resize(kSmallFiles + one * room + one / 2);
  }
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  const absl::Cleanup settle = [&] { trainee.engine->SettleCheckpoint(); };
  // What others have filled the disk with is removed after a save has failed.
  std::thread others;
  if (absl::StrContains(how, "others")) {
    const std::string theirs = a.options.dir + "/theirs";
    std::ofstream file(theirs);
    while (file << std::string(4096, 'x') << std::flush) {
    }
    const int events = inotify_init1(IN_CLOEXEC);
    inotify_add_watch(events, a.options.dir.c_str(), IN_DELETE);
    others = std::thread([theirs, events] {
      char event[4096];
      if (read(events, event, sizeof(event)) > 0) unlink(theirs.c_str());
      close(events);
    });
  }
  absl::Status status;
  while (trainee.engine->step() < a.steps && status.ok()) {
    status = trainee.TrainStep(trainee.engine->step());
    if (status.ok()) status = manager->MaybeSave().status();
  }
  if (status.ok()) status = manager->Finish();
  if (others.joinable()) others.join();
  std::string report = status.ToString();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(a.options.dir)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    const bool whole =
        CheckFilesOf(
            a.options.dir + "/" + name, FileSystem::Real(),
            *a.options.node_local ? FolderHolds::kPart : FolderHolds::kAll)
            .ok();
    absl::StrAppend(&report, " ", name, whole ? "=whole" : "");
  }
  return report;
}

class SmallDiskTest : public CheckpointManagerTest {
 protected:
  std::vector<std::string> Run(int ranks, int steps, int room,
                               const std::string& how) {
    fs::create_directories(dir_);
    return RunOnRanks(ranks, "TrainOnASmallDisk",
                      absl::StrCat(dir_, "\n", steps, "\n", room, "\n", how));
  }
};

// The disk holds keep_last checkpoints, and not one more; and one alone.
TEST_F(SmallDiskTest, HoldsWhatIsKeptAndNotOneMore) {
  for (const std::string how : {"sync", "async", "sync local", "async local"}) {
    SCOPED_TRACE(how);
    const int ranks = absl::StrContains(how, "local") ? 2 : 1;
    const std::vector<std::string> ends = Run(ranks, 7, 2, how);
    if (ends[0] == kMayNot) GTEST_SKIP() << kMayNot;
    EXPECT_THAT(ends, Each("OK job.lock latest step-00000006=whole "
                           "step-00000007=whole"));
    EXPECT_THAT(RankPool::Get(ranks)->stderr_of(0),
                AllOf(HasSubstr("No space left on device"),
                      HasSubstr("bytes are free, now that step-0000"),
                      HasSubstr("fewer than keep_last=2")));
  }
}

TEST_F(SmallDiskTest, NeverLosesItsOnlyCheckpoint) {
  const std::vector<std::string> ends = Run(1, 5, 1, "sync once");
  if (ends[0] == kMayNot) GTEST_SKIP() << kMayNot;
  EXPECT_THAT(ends[0],
              AllOf(HasSubstr("RESOURCE_EXHAUSTED"),
                    HasSubstr("No space left on device"),
                    HasSubstr(dir_ + ": a checkpoint needs some "),
                    HasSubstr(" bytes are free"), HasSubstr("Tried for 0"),
                    EndsWith(" job.lock latest step-00000002=whole")));
}

TEST_F(SmallDiskTest, IsFullForAWhile) {
  for (const std::string how : {"sync others", "async others"}) {
    SCOPED_TRACE(how);
    const std::vector<std::string> ends = Run(1, 3, 9, how);
    if (ends[0] == kMayNot) GTEST_SKIP() << kMayNot;
    // If saves are async, another may come before the disk has room again.
    EXPECT_THAT(ends[0],
                AllOf(StartsWith("OK "), EndsWith(" step-00000003=whole")));
  }
}

// Returns how Create ends for a run that saves, and for one that only reads,
// before and after there is a checkpoint.
TESSERA_RANK_FUNCTION(CreateOnAReadOnlyDisk) {
  ManagerArgs a(args);
  CheckpointManagerOptions reads;
  reads.dir = a.options.dir;
  SmallDisk disk;
  if (!disk.Mount(a.options.dir)) return std::string(kMayNot);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  Engine* const engine = trainee.engine.get();
  if (a.steps > 0) {
    TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(
        absl::StrCat(a.options.dir, "/", StepFolderName(1))));
  }
  disk.MakeReadOnly();
  const absl::Status of_saver =
      CheckpointManager::Create(engine, a.options).status();
  const absl::Status of_reader =
      CheckpointManager::Create(engine, reads).status();
  return absl::StrCat(of_saver.ToString(), "; reader: ", of_reader.ToString());
}

TEST_F(SmallDiskTest, AReadOnlyFolderIsForReaders) {
  fs::create_directories(dir_);
  for (const bool saved : {false, true}) {
    const std::string end =
        RunOnRanks(1, "CreateOnAReadOnlyDisk",
                   absl::StrCat(dir_, saved ? "\n1" : "\n0"))[0];
    if (end == kMayNot) GTEST_SKIP() << kMayNot;
    EXPECT_THAT(end, AllOf(StartsWith("PERMISSION_DENIED: "),
                           HasSubstr("Read-only file system"),
                           HasSubstr(dir_ + ": no checkpoint can be saved")));
    EXPECT_EQ(absl::EndsWith(end, "reader: OK"), saved) << end;
  }
}

TESSERA_RANK_FUNCTION(PositionThrowsOnOneRank) {
  ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  const absl::Status thrown = manager->Save([&]() -> std::string {
    if (trainee.rank == 1) throw std::runtime_error("no position");
    return "";
  });
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  return thrown.ToString();
}

TEST_F(CheckpointManagerTest, WhatOneRankThrowsIsAllRanksError) {
  EXPECT_THAT(
      RunOnRanks(2, "PositionThrowsOnOneRank", absl::StrCat(dir_, "\n1")),
      Each(AllOf(HasSubstr("rank 1"), HasSubstr("no position"))));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

}  // namespace
}  // namespace tessera
