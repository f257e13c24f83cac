// Tests what leaves a run's folder when the disk has no room for a save.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/step_folders.h"
#include "checkpoint/format/step_folders_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Bytes of all files.
int64_t BytesOf(MemoryDisk* disk, const std::string& path) {
  int64_t bytes = 0;
  for (const auto& [name, content] : disk->FilesIn(path)) {
    bytes += static_cast<int64_t>(content.size());
  }
  return bytes;
}

// A disk that holds so many checkpoints, and not one more.
class MakeRoomTest : public StepFoldersTest {
 protected:
  void Fill(int steps, int room_for) {
    for (int step = 1; step <= steps; ++step) Save(step, step);
    one_ = BytesOf(&disk_, PathOf(1));
    disk_.capacity = one_ * room_for + one_ / 2;
  }
  int64_t one_ = 0;
};

TEST_F(MakeRoomTest, OlderOnesGoAsFarAsThereIsNoRoom) {
  Fill(3, 3);
  Retention kept{.keep_last = 3};
  const DiskRoom room =
      MakeRoom(kDir, StepFolderName(3), kept, /*least=*/0, &disk_);
  EXPECT_THAT(room.removed, ElementsAre(StepFolderName(1)));
  EXPECT_GE(room.needed_bytes, one_);
  EXPECT_LT(room.needed_bytes, one_ + one_ / 10);
  EXPECT_EQ(room.free_bytes, one_ + one_ / 2);
  Save(4, 4);
  EXPECT_THAT(Found(), ElementsAre(4, 3, 2));
  // With room for it nothing is removed; where a quota refuses, something is.
  disk_.capacity = -1;
  EXPECT_THAT(MakeRoom(kDir, StepFolderName(4), kept, 0, &disk_).removed,
              IsEmpty());
  EXPECT_THAT(MakeRoom(kDir, StepFolderName(4), kept, 1, &disk_).removed,
              ElementsAre(StepFolderName(2)));
}

// Whatever it needs, and however often it is asked.
TEST_F(MakeRoomTest, TheNewestWholeOneAndTheKnownOneStay) {
  Fill(6, 6);
  disk_.capacity = 0;
  const Retention kept{.keep_last = 6, .keep_every = 2};
  for (int least : {0, 9}) {
    (void)MakeRoom(kDir, StepFolderName(3), kept, least, &disk_);
  }
  // Multiples of 2 are promised for ever; of the others 5 is the newest.
  EXPECT_THAT(Found(), ElementsAre(6, 5, 4, 3, 2));
  // While no checkpoint is known to be whole, none that is to be kept is
  // removed.
  (void)MakeRoom(kDir, "", kept, 9, &disk_);
  // None is removed where the whole one is damaged now, either.
  Damage(3);
  (void)MakeRoom(kDir, StepFolderName(3), kept, 9, &disk_);
  EXPECT_THAT(Found(), ElementsAre(6, 5, 4, -3, 2));
}

TEST_F(MakeRoomTest, TheBestStays) {
  Fill(4, 4);
  disk_.capacity = 0;
  Retention kept{.keep_last = 4};
  kept.keep = {StepFolderName(1)};
  (void)MakeRoom(kDir, StepFolderName(4), kept, 9, &disk_);
  EXPECT_THAT(Found(), ElementsAre(4, 1));
}

// A damaged one is newer than what was loaded, so it is not removed otherwise.
TEST_F(MakeRoomTest, DamagedOnesGoFirst) {
  Fill(4, 4);
  Retention kept{.keep_last = 9};
  kept.passed_over = {{StepFolderName(4), absl::DataLossError("a bit")}};
  EXPECT_THAT(MakeRoom(kDir, StepFolderName(3), kept, 0, &disk_).removed,
              ElementsAre(StepFolderName(4)));
  EXPECT_THAT(Found(), ElementsAre(3, 2, 1));
}

TEST_F(MakeRoomTest, WhatSavesLeftGoesFirstOfAll) {
  Fill(2, 2);
  ASSERT_EQ(disk_.MakeFolder(AT_FDCWD, PathOf(3)), 0);
  disk_.capacity = -1;
  Put(PathOf(3) + "/0123456789abcdef.rank-00000", std::string(one_, 'x'));
  disk_.capacity = 3 * one_ + one_ / 2;
  EXPECT_THAT(
      MakeRoom(kDir, StepFolderName(2), {.keep_last = 2}, 0, &disk_).removed,
      IsEmpty());
  EXPECT_THAT(Found(), ElementsAre(2, 1));
  EXPECT_EQ(disk_.FilesIn(kDir).count(StepFolderName(3)), 0u);
}

// A save that finds no room leaves nothing behind.
TEST_F(MakeRoomTest, ASaveWithoutRoomLeavesNoFolder) {
  Fill(1, 1);
  bool committed = false;
  const absl::Status status =
      SampleCheckpoint(2).Save(PathOf(2), &disk_, 2, &committed);
  EXPECT_TRUE(IsDiskFull(status)) << status;
  EXPECT_TRUE(IsDiskFull(StatusFromText(StatusToText(status))));
  EXPECT_EQ(disk_.FilesIn(kDir).size(), 1u);
}

}  // namespace
}  // namespace tessera
