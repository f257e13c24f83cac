// CheckpointFolderTest saves checkpoints on a disk in memory, over an older
// one.
#ifndef CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_TEST_UTIL_H_
#define CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_TEST_UTIL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {

inline constexpr char kPath[] = "/run/ckpt";
inline constexpr int kRanks = 2;

class CheckpointFolderTest : public testing::Test {
 protected:
  // Returns a disk that has the old checkpoint on it, synced.
  std::unique_ptr<MemoryDisk> WithOld() {
    auto disk = std::make_unique<MemoryDisk>();
    TESSERA_EXPECT_OK(Save(old_, disk.get()));
    return disk;
  }
  absl::Status Save(const SampleCheckpoint& sample, MemoryDisk* disk) {
    return sample.Save(kPath, disk, kRanks, &committed_);
  }
  // Returns which of the two is there, whole: "old", "new", or why neither is.
  std::string Found(MemoryDisk* disk) {
    const absl::Status old = old_.Compare(kPath, disk, 1);
    const absl::Status now = new_.Compare(kPath, disk, 1);
    if (old.ok()) return "old";
    return now.ok() ? "new"
                    : absl::StrCat(old.ToString(), "; ", now.ToString());
  }
  // Checks what is there after a save that ended with `status`. The next save
  // may have to clean up.
  void ExpectFound(MemoryDisk* disk, const absl::Status& status, int64_t call) {
    const std::string found = Found(disk);
    if (status.ok() || !committed_) {
      EXPECT_EQ(found, status.ok() ? "new" : "old") << "call " << call;
    } else {
      EXPECT_TRUE(found == "new" || found == "old") << found;
    }
  }
  // The next save works, and leaves its own files alone.
  void ExpectCleanAfterNext(MemoryDisk* disk) {
    disk->before = nullptr;
    const SampleCheckpoint next(3);
    TESSERA_ASSERT_OK(Save(next, disk));
    TESSERA_EXPECT_OK(next.Compare(kPath, disk, 2));
    EXPECT_EQ(disk->FilesIn(kPath).size(), kRanks + 2u);  // manifest, lock
  }
  // Calls of a save over the old checkpoint.
  int64_t CallsOfSave() {
    auto disk = WithOld();
    const int64_t before = disk->calls();
    TESSERA_EXPECT_OK(Save(new_, disk.get()));
    return disk->calls() - before;
  }

  const SampleCheckpoint old_{1}, new_{2};
  bool committed_ = false;
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_TEST_UTIL_H_
