// Saves that are refused, cut short, killed or lose power at each of their
// system calls, with an older checkpoint in the same folder: what is then found
// is one of the two, whole, and the next save leaves nothing else.
#include "checkpoint/format/checkpoint_folder.h"

#include <errno.h>
#include <fcntl.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder_test_util.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(CheckpointFolderTest, EachCallRefused) {
  const int64_t calls = CallsOfSave();
  EXPECT_GT(calls, 30);
  for (int error : {ENOSPC, EIO, EPERM, EROFS, EDQUOT, ENOLCK}) {
    for (int64_t k = 0; k < calls; ++k) {
      auto disk = WithOld();
      const int64_t first = disk->calls();
      disk->before = [&](int64_t call, const char*) {
        return call == first + k ? -error : 0;
      };
      const absl::Status status = Save(new_, disk.get());
      disk->before = nullptr;
      ExpectFound(disk.get(), status, k);
      if (!status.ok()) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(std::strerror(error)));
      }
      ExpectCleanAfterNext(disk.get());
    }
  }
}

// All later calls fail, too, as on a disk that is full or gone.
TEST_F(CheckpointFolderTest, EachCallRefusedForGood) {
  const int64_t calls = CallsOfSave();
  for (int64_t k = 0; k < calls; ++k) {
    auto disk = WithOld();
    const int64_t first = disk->calls();
    disk->before = [&](int64_t call, const char*) {
      return call >= first + k ? -EIO : 0;
    };
    const absl::Status status = Save(new_, disk.get());
    EXPECT_TRUE(committed_ || !status.ok()) << "call " << k;
    disk->before = nullptr;
    ExpectFound(disk.get(), status, k);
    ExpectCleanAfterNext(disk.get());
  }
}

// An interrupted call is made again, and a partial write goes on.
TEST_F(CheckpointFolderTest, EachCallInterruptedOrCutShort) {
  const int64_t calls = CallsOfSave();
  for (int64_t k = 0; k < calls; ++k) {
    for (bool cut : {false, true}) {
      auto disk = WithOld();
      int64_t first = disk->calls();
      disk->before = [&](int64_t call, const char* what) -> int64_t {
        if (call != first + k) return 0;
        if (!cut) return -EINTR;
        return strcmp(what, "write") == 0 || strcmp(what, "read") == 0 ? 1 : 0;
      };
      TESSERA_ASSERT_OK(Save(new_, disk.get())) << "call " << k;
      first = disk->calls();
      TESSERA_EXPECT_OK(new_.Compare(kPath, disk.get(), 2)) << "call " << k;
      disk->before = nullptr;
      EXPECT_EQ(disk->FilesIn(kPath).size(), kRanks + 2u);
    }
  }
}

TEST_F(CheckpointFolderTest, AllCallsInterruptedOrCutShort) {
  auto disk = WithOld();
  disk->before = [&](int64_t call, const char* what) -> int64_t {
    if (call % 3 == 1) return -EINTR;
    const bool bytes = strcmp(what, "write") == 0 || strcmp(what, "read") == 0;
    return bytes && call % 3 == 2 ? 7 : 0;
  };
  TESSERA_ASSERT_OK(Save(new_, disk.get()));
  TESSERA_EXPECT_OK(new_.Compare(kPath, disk.get(), 2));
  TESSERA_EXPECT_OK(RemoveCheckpoint(kPath, disk.get()));
  EXPECT_TRUE(disk->FilesIn("/run").empty());
}

// Killed before each call (all that was done is kept), or the power gone:
// nothing that was not synced is kept, or names alone, or any part of it.
TEST_F(CheckpointFolderTest, KilledOrWithoutPowerAtEachCall) {
  const int64_t calls = CallsOfSave();
  int olds = 0, news = 0;
  for (int64_t k = 0; k <= calls; ++k) {
    for (int way = 0; way < 12; ++way) {
      std::mt19937 random(static_cast<unsigned>(way));
      const auto keeps = [&](bool is_name) {
        if (way < 2) return way == 0;
        return way == 2 ? is_name : random() % 2 == 0;
      };
      auto disk = WithOld();
      const int64_t first = disk->calls();
      std::unique_ptr<MemoryDisk> after;
      disk->before = [&](int64_t call, const char*) {
        if (call == first + k) after = disk->AfterPowerFailure(keeps);
        return int64_t{0};
      };
      TESSERA_ASSERT_OK(Save(new_, disk.get()));
      if (after == nullptr) after = disk->AfterPowerFailure(keeps);
      const std::string found = Found(after.get());
      ASSERT_TRUE(found == "old" || found == "new")
          << "call " << k << " way " << way << ": " << found;
      // Once it is said to be saved, it stays.
      if (k == calls) EXPECT_EQ(found, "new");
      ++(found == "old" ? olds : news);
      ExpectCleanAfterNext(after.get());
    }
  }
  EXPECT_GT(olds, 100);
  EXPECT_GT(news, 12);
}

// The answer to a rename is lost, as can happen over NFS.
TEST_F(CheckpointFolderTest, ARenameThatIsDoneAndReportedAsFailed) {
  auto disk = WithOld();
  bool done = false;
  disk->before = [&](int64_t, const char* call) {
    if (done || strcmp(call, "rename") != 0) return int64_t{0};
    done = true;
    for (const auto& [name, bytes] : disk->FilesIn(kPath)) {
      if (absl::EndsWith(name, ".manifest")) {
        disk->Rename(AT_FDCWD, absl::StrCat(kPath, "/", name),
                     absl::StrCat(kPath, "/", kManifestName));
      }
    }
    return int64_t{-EIO};
  };
  EXPECT_FALSE(Save(new_, disk.get()).ok());
  EXPECT_TRUE(committed_);
  EXPECT_EQ(Found(disk.get()), "new");
  ExpectCleanAfterNext(disk.get());
}

// At each of a writer's calls a reader finds one of the two or gets an error.
TEST_F(CheckpointFolderTest, AReaderBesideAWriter) {
  const int64_t calls = CallsOfSave();
  int replaced = 0;
  for (int64_t k = 0; k < calls; ++k) {
    auto disk = WithOld();
    const int64_t first = disk->calls();
    absl::StatusOr<CheckpointReader> reader = absl::UnknownError("not opened");
    bool done = false;
    disk->before = [&](int64_t call, const char*) {
      if (done || call != first + k) return int64_t{0};
      done = true;
      const std::string found = Found(disk.get());
      EXPECT_TRUE(found == "old" || found == "new") << found;
      reader = CheckpointReader::Open(kPath, disk.get());
      return int64_t{0};
    };
    TESSERA_ASSERT_OK(Save(new_, disk.get()));
    TESSERA_ASSERT_OK(reader.status());
    const absl::Status read = reader->Verify(1);
    if (absl::IsAborted(read)) ++replaced;
    EXPECT_TRUE(read.ok() || absl::IsAborted(read)) << read;
  }
  EXPECT_GT(replaced, 20);
}

TEST_F(CheckpointFolderTest, TwoThatSaveAtOnce) {
  MemoryDisk disk;
  absl::StatusOr<Saving> first = Saving::Begin(kPath, &disk);
  TESSERA_ASSERT_OK(first.status());
  EXPECT_THAT(Saving::Begin(kPath, &disk).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(kPath), HasSubstr("another process"))));
  first = absl::CancelledError("ended");
  TESSERA_EXPECT_OK(Saving::Begin(kPath, &disk).status());
}

TEST_F(CheckpointFolderTest, WhatIsNotOursStays) {
  auto disk = WithOld();
  for (const char* name :
       {"notes.txt", "00000000000000aa.rank-0", "manifest.old",
        "00000000000000AA.rank-00000", "0.manifest"}) {
    disk->Close(
        disk->Open(AT_FDCWD, absl::StrCat(kPath, "/", name), O_CREAT | O_RDWR));
  }
  TESSERA_ASSERT_OK(Save(new_, disk.get()));
  EXPECT_EQ(disk->FilesIn(kPath).size(), kRanks + 2u + 5u);
  TESSERA_ASSERT_OK(RemoveCheckpoint(kPath, disk.get()));
  EXPECT_EQ(disk->FilesIn(kPath).size(), 5u);
}

TEST_F(CheckpointFolderTest, RemovesTheFolderToo) {
  auto disk = WithOld();
  TESSERA_ASSERT_OK(RemoveCheckpoint(kPath, disk.get()));
  EXPECT_TRUE(disk->FilesIn("/run").empty());
}

TEST_F(CheckpointFolderTest, ARankWhoseFolderIsAnother) {
  MemoryDisk disk;
  absl::StatusOr<Saving> saving = Saving::Begin(kPath, &disk);
  TESSERA_ASSERT_OK(saving.status());
  proto::CheckpointManifest manifest = new_.head();
  manifest.set_id(saving->id());
  manifest.add_files()->set_bytes(7);
  EXPECT_THAT(saving->Commit(manifest, &committed_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("a disk of each host's own")));
  EXPECT_FALSE(committed_);
}

}  // namespace
}  // namespace tessera
