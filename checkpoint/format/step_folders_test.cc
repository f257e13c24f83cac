// Tests which checkpoints of a run are kept, in which order they were saved,
// and what is left alone.
#include "checkpoint/format/step_folders.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/run_lock.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "checkpoint/format/step_folders_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

TEST_F(StepFoldersTest, TheOneThatWasSavedLastIsFirst) {
  EXPECT_THAT(Found(), IsEmpty());
  Save(10, 1);
  Save(300, 2);
  Save(20, 3);  // after going back
  EXPECT_THAT(Found(), ElementsAre(20, 300, 10));
  Damage(300);
  EXPECT_THAT(Found(), ElementsAre(20, -300, 10));
}

TEST_F(StepFoldersTest, OtherNamesAreNoStepFolders) {
  Save(7, 1);
  for (const char* name : {"step-7", "step-0000000x", "best", "step-"}) {
    bool committed = false;
    TESSERA_EXPECT_OK(SampleCheckpoint(1).Save(absl::StrCat(kDir, "/", name),
                                               &disk_, 1, &committed));
  }
  EXPECT_THAT(Found(), ElementsAre(7));
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(7), {.keep_last = 1}, &disk_));
  EXPECT_THAT(NamesIn(kDir),
              UnorderedElementsAre("step-00000007", "step-7", "step-0000000x",
                                   "best", "step-"));
}

TEST_F(StepFoldersTest, LatestNamesOneAndIsReplaced) {
  Save(1, 1);
  TESSERA_EXPECT_OK(WriteLatest(kDir, StepFolderName(1), &disk_));
  Put(absl::StrCat(kDir, "/latest.new"), "of one that was killed");
  TESSERA_EXPECT_OK(WriteLatest(kDir, StepFolderName(2), &disk_));
  EXPECT_EQ(disk_.FilesIn(kDir)["latest"], "step-00000002\n");
  EXPECT_EQ(disk_.FilesIn(kDir).count("latest.new"), 0);
  // The error of the run's folder names its newest checkpoint, if there is one.
  TESSERA_ASSERT_OK_AND_ASSIGN(const Folder folder, Folder::Open(kDir, &disk_));
  EXPECT_THAT(ReadManifest(folder).status().message(),
              EndsWith("(it has no file 'manifest')"));
  TESSERA_EXPECT_OK(WriteLatest(kDir, StepFolderName(1), &disk_));
  EXPECT_THAT(ReadManifest(folder).status().message(),
              EndsWith(absl::StrCat("; the newest of those in it is ", kDir,
                                    "/step-00000001")));
}

TEST_F(StepFoldersTest, TheLastAndTheMultiplesAreKept) {
  for (int64_t step = 1; step <= 8; ++step) Save(step, step);
  std::vector<std::string> removed;
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(8),
                                   {.keep_last = 2, .keep_every = 3}, &disk_,
                                   FolderHolds::kAll, &removed));
  EXPECT_THAT(Found(), ElementsAre(8, 7, 6, 3));
  EXPECT_THAT(removed, ElementsAre(StepFolderName(5), StepFolderName(4),
                                   StepFolderName(2), StepFolderName(1)));
  // Those that stay for ever do not count.
  Save(9, 9);
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(9),
                                   {.keep_last = 1, .keep_every = 3}, &disk_));
  EXPECT_THAT(Found(), ElementsAre(9, 8, 6, 3));
}

// However many there are, a save reads the manifests of the others alone.
TEST_F(StepFoldersTest, ThoseThatStayForEverAreNotRead) {
  for (int64_t step = 1; step <= 12; ++step) Save(step, step);
  Save(13, 13);
  int reads = 0;
  disk_.before = [&](int64_t, const char* call) {
    reads += std::string(call) == "read" ? 1 : 0;
    return 0;
  };
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(13),
                                   {.keep_last = 2, .keep_every = 1}, &disk_));
  EXPECT_EQ(reads, 0);
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(13),
                                   {.keep_last = 1, .keep_every = 2}, &disk_));
  disk_.before = nullptr;
  // Seven manifests, that of 13 once more, and of six that go.
  EXPECT_EQ(reads, 7 + 1 + 6);
  EXPECT_THAT(Found(), ElementsAre(13, 12, 10, 8, 6, 4, 2));
}

TEST_F(StepFoldersTest, OnlyTheLastOnesDataFilesAreOpened) {
  const auto opened = [&] {
    int opens = 0;
    disk_.before = [&](int64_t, const char* call) {
      opens += std::string(call) == "open" ? 1 : 0;
      return 0;
    };
    TESSERA_EXPECT_OK(
        RemoveOldSteps(kDir, StepFolderName(1), {.keep_last = 2}, &disk_));
    disk_.before = nullptr;
    return opens;
  };
  Save(1, 1);
  Save(2, 2);
  const int of_two = opened();
  // There are as many folders, with more files in the old one.
  bool committed = false;
  TESSERA_EXPECT_OK(
      SampleCheckpoint(3).Save(PathOf(3), &disk_, 50, &committed));
  EXPECT_LT(opened(), of_two + 50);
  EXPECT_THAT(Found(), ElementsAre(2, 1));
}

TEST_F(StepFoldersTest, TheOneJustSavedIsKeptWhateverItsTime) {
  Save(5, 100);
  Save(6, 3);  // by a host whose clock is late
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(6), {.keep_last = 1}, &disk_));
  EXPECT_THAT(Found(), ElementsAre(5, 6));
}

TEST_F(StepFoldersTest, ADamagedOneIsNotCountedAsAGoodOne) {
  for (int64_t step = 1; step <= 3; ++step) Save(step, step);
  Damage(3);
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(3), {.keep_last = 1}, &disk_));
  EXPECT_THAT(Found(), ElementsAre(-3, 2));
}

TEST_F(StepFoldersTest, TheBestStaysAndDoesNotCount) {
  for (int64_t step = 1; step <= 5; ++step) Save(step, step);
  Retention retention{.keep_last = 2};
  retention.keep = {StepFolderName(2), StepFolderName(77)};
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(5), retention, &disk_));
  EXPECT_THAT(Found(), ElementsAre(5, 4, 2));
  TESSERA_EXPECT_OK(WriteBest(kDir, StepFolderName(2), &disk_));
  EXPECT_EQ(disk_.FilesIn(kDir)["best"], "step-00000002\n");
}

// A reader has passed it over, though its files have the right sizes.
TEST_F(StepFoldersTest, OneThatWasPassedOverIsNotCountedEither) {
  for (int64_t step = 1; step <= 4; ++step) Save(step, step);
  Retention retention{.keep_last = 2};
  retention.passed_over = {{StepFolderName(3), absl::UnknownError("a disk")}};
  (void)RemoveOldSteps(kDir, StepFolderName(4), retention, &disk_);
  EXPECT_THAT(Found(), ElementsAre(4, 3, 2));
  Save(1, 1);
  retention.passed_over = {{StepFolderName(3), absl::DataLossError("a bit")}};
  TESSERA_EXPECT_OK(RemoveOldSteps(kDir, StepFolderName(4), retention, &disk_));
  EXPECT_THAT(Found(), ElementsAre(4, 2));
}

TEST_F(StepFoldersTest, AManifestOfNoBytesIsDamage) {
  for (int64_t step = 1; step <= 3; ++step) Save(step, step);
  const Folder folder = Folder::Open(PathOf(2), &disk_).value();
  TESSERA_EXPECT_OK(folder.Remove(kManifestName));
  TESSERA_EXPECT_OK(folder.CreateFile(kManifestName).status());
  EXPECT_THAT(Found(), ElementsAre(3, -2, 1));
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(3), {.keep_last = 2}, &disk_));
  EXPECT_THAT(Found(), ElementsAre(3, 1));
}

TEST_F(StepFoldersTest, AManifestThatCannotBeReadNowIsNotTheOldest) {
  for (int64_t step : {10, 20, 30}) Save(step, step);
  int reads = 0;
  disk_.before = [&](int64_t, const char* call) {
    return std::string(call) == "read" && ++reads == 2 ? -ESTALE : 0;
  };
  EXPECT_THAT(Found(), ElementsAre(30, 20, 10));
  disk_.before = nullptr;
}

// A checkpoint that cannot be read for a moment is not damaged.
TEST_F(StepFoldersTest, WhateverFailsAllThatAreKeptStay) {
  std::vector<SampleCheckpoint> saved;
  for (int64_t step = 1; step <= 3; ++step) {
    Save(step, step);
    saved.emplace_back(static_cast<int>(step));
  }
  const auto remove = [&] {
    (void)RemoveOldSteps(kDir, StepFolderName(3), {.keep_last = 3}, &disk_);
    disk_.before = nullptr;
    for (int64_t step = 1; step <= 3; ++step) {
      TESSERA_EXPECT_OK(
          saved[static_cast<size_t>(step - 1)].Compare(PathOf(step), &disk_, 1))
          << step;
    }
  };
  for (const int error : {EIO, ESTALE, EACCES, EMFILE, ENOMEM}) {
    bool refused = true;
    for (int64_t k = 0; refused && !HasFailure(); ++k) {
      refused = false;
      const int64_t first = disk_.calls();
      disk_.before = [&](int64_t call, const char*) {
        refused |= call == first + k;
        return call == first + k ? -error : 0;
      };
      SCOPED_TRACE(absl::StrCat("call ", k, ", errno ", error));
      remove();
    }
    // All reads fail except the newest checkpoint's.
    int reads = 0;
    disk_.before = [&](int64_t, const char* call) {
      return std::string(call) == "read" && ++reads != 3 ? -error : 0;
    };
    SCOPED_TRACE(absl::StrCat("reads, errno ", error));
    remove();
  }
}

TEST_F(StepFoldersTest, WhatInterruptedSavesLeftGoesAndWhatIsOthersStays) {
  Save(1, 1);
  Save(2, 2);
  Save(3, 3);
  // Killed before their commits; the second has a file of the user's.
  for (int64_t step : {4, 5}) {
    disk_.MakeFolder(AT_FDCWD, PathOf(step));
    Put(PathOf(step) + "/0123456789abcdef.rank-00000", "half a file");
  }
  Put(PathOf(5) + "/notes.txt", "mine");
  // Another process is saving there.
  const auto saving = Saving::Begin(PathOf(6), &disk_);
  TESSERA_EXPECT_OK(saving.status());
  Put(PathOf(6) + "/0123456789abcdef.rank-00000", "half a file");
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(3), {.keep_last = 1}, &disk_));
  EXPECT_THAT(Found(), ElementsAre(3));
  EXPECT_THAT(NamesIn(kDir),
              UnorderedElementsAre(StepFolderName(3), StepFolderName(5),
                                   StepFolderName(6)));
  EXPECT_THAT(NamesIn(PathOf(5)), ElementsAre("notes.txt"));
  EXPECT_THAT(NamesIn(PathOf(6)),
              UnorderedElementsAre("lock", "0123456789abcdef.rank-00000"));
}

// A step that something else has the name of: it is damage, and another's.
TEST_F(StepFoldersTest, AFileInThePlaceOfAStep) {
  Save(1, 1);
  Save(3, 3);
  Put(PathOf(2), "mine");
  const auto found = ListStepFolders(kDir, &disk_).value();
  ASSERT_EQ(found.size(), 3u);
  EXPECT_THAT(found[1].manifest, StatusIs(absl::StatusCode::kDataLoss,
                                          HasSubstr("is not a folder")));
  TESSERA_EXPECT_OK(
      RemoveOldSteps(kDir, StepFolderName(3), {.keep_last = 1}, &disk_));
  EXPECT_EQ(disk_.FilesIn(kDir)[StepFolderName(2)], "mine");
  Save(2, 4);
  EXPECT_THAT(Found(), ElementsAre(2, 3));
  // It has another name now.
  std::vector<std::string> contents;
  for (const auto& [name, bytes] : disk_.FilesIn(kDir)) {
    if (bytes == "mine") contents.push_back(name);
  }
  EXPECT_THAT(contents, ElementsAre(StartsWith("step-00000002.aside-")));
}

// Nothing is known of when it was saved.
TEST_F(StepFoldersTest, OneOfAnotherFormatStandsWhereItsStepDoes) {
  for (int64_t step = 1; step <= 3; ++step) Save(step, step);
  const Folder folder = Folder::Open(PathOf(2), &disk_).value();
  auto manifest = ReadManifest(folder).value();
  manifest.set_format_version(99);
  TESSERA_EXPECT_OK(folder.Remove(kManifestName));
  Put(absl::StrCat(PathOf(2), "/", kManifestName),
      EncodeManifest(manifest).value());
  EXPECT_THAT(
      ListStepFolders(kDir, &disk_).value()[1].manifest,
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("format 99")));
  EXPECT_THAT(Found(), ElementsAre(3, 2, 1));
}

TEST_F(StepFoldersTest, AFolderIsOneJobs) {
  absl::StatusOr<RunLock> first = RunLock::Take(kDir, &disk_);
  TESSERA_ASSERT_OK(first.status());
  EXPECT_THAT(
      RunLock::Take(kDir, &disk_).status(),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr(absl::StrCat("process ", getpid(), " on host ")),
                     HasSubstr(" UTC saves its checkpoints there"))));
  // This is not the lock of a checkpoint, which each save takes, too.
  Save(1, 1);
  first = absl::CancelledError("ended");
  TESSERA_EXPECT_OK(RunLock::Take(kDir, &disk_).status());
}

// No other job holds it then.
TEST_F(StepFoldersTest, AFileSystemMayHaveNoLocks) {
  for (const int error : {ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL}) {
    disk_.before = [error](int64_t, const char* call) {
      return std::string(call) == "lock" ? -error : 0;
    };
    EXPECT_THAT(RunLock::Take(kDir, &disk_).status(),
                StatusIs(absl::StatusCode::kUnimplemented,
                         AllOf(HasSubstr("the folder cannot be locked: "),
                               HasSubstr(std::strerror(error)))));
  }
  disk_.before = nullptr;
}

// At every call of the disk that is refused a good checkpoint stays.
TEST_F(StepFoldersTest, WhateverFailsAGoodOneStays) {
  for (int64_t k = 0; k < 10'000; ++k) {
    MemoryDisk fresh;
    SampleCheckpoint old(1), good(2);
    good.set_saved_unix_micros(2);
    bool committed = false;
    TESSERA_ASSERT_OK(old.Save(PathOf(1), &fresh, 2, &committed));
    TESSERA_ASSERT_OK(good.Save(PathOf(2), &fresh, 2, &committed));
    const int64_t before = fresh.calls();
    bool refused = false;
    fresh.before = [&](int64_t call, const char*) {
      if (call != before + k) return 0;
      refused = true;
      return -EIO;
    };
    (void)RemoveOldSteps(kDir, StepFolderName(2), {.keep_last = 1}, &fresh);
    fresh.before = nullptr;
    TESSERA_EXPECT_OK(good.Compare(PathOf(2), &fresh, 1)) << "call " << k;
    if (!refused) {
      EXPECT_GT(k, 20);
      return;
    }
  }
  FAIL() << "it never came to its end";
}

}  // namespace
}  // namespace tessera
