// Saves that are refused, cut short, killed or lose power at each of their
// system calls, with an older checkpoint in the same folder: what is then found
// is one of the two, whole, and the next save leaves nothing else.
#include "checkpoint/format/checkpoint_folder.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/disk/memory_disk.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/sample_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kPath[] = "/run/ckpt";
constexpr int kRanks = 2;

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

TEST_F(CheckpointFolderTest, AManifestThatIsNoneIsNotReplaced) {
  MemoryDisk disk;
  TESSERA_ASSERT_OK(Folder::Make(kPath, &disk).status());
  const std::string path = absl::StrCat(kPath, "/", kManifestName);
  const int fd = disk.Open(AT_FDCWD, path, O_CREAT | O_RDWR);
  disk.Write(fd, "mine", 4, 0);
  disk.Close(fd);
  for (const absl::Status& status :
       {Save(new_, &disk), RemoveCheckpoint(kPath, &disk)}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr(path)));
  }
  EXPECT_EQ(disk.FilesIn(kPath).at(kManifestName), "mine");
}

// Damage is a way to damage a file of a checkpoint: a power cut, a flip, a
// hand.
struct Damage {
  std::string name;
  std::function<void(MemoryDisk*, const std::string& path)> make;
};
std::vector<Damage> Damages() {
  std::vector<Damage> damages;
  const auto add = [&](std::string name,
                       std::function<std::string(std::string)> change) {
    damages.push_back(
        {std::move(name), [change](MemoryDisk* disk, const std::string& path) {
           const size_t cut = path.rfind('/');
           const std::string bytes = change(
               disk->FilesIn(path.substr(0, cut)).at(path.substr(cut + 1)));
           disk->Remove(AT_FDCWD, path);
           const int fd = disk->Open(AT_FDCWD, path, O_CREAT | O_RDWR);
           if (!bytes.empty()) {
             disk->Write(fd, bytes.data(), static_cast<int64_t>(bytes.size()),
                         0);
           }
           disk->Close(fd);
         }});
  };
  for (size_t at = 0; at < 8; ++at) {
    add(absl::StrCat("flip at ", at), [at](std::string bytes) {
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ 4);
      return bytes;
    });
  }
  add("zeros at its begin", [](std::string bytes) {
    return std::string(std::min<size_t>(bytes.size(), 512), '\0') +
           bytes.substr(std::min<size_t>(bytes.size(), 512));
  });
  add("zeros",
      [](const std::string& bytes) { return std::string(bytes.size(), '\0'); });
  add("four zeros", [](const std::string&) { return std::string(4, '\0'); });
  add("random", [](std::string bytes) {
    std::mt19937 random(7);
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
  });
  add("empty", [](const std::string&) { return ""; });
  add("cut", [](const std::string& bytes) {
    return bytes.substr(0, bytes.size() / 2);
  });
  damages.push_back({"gone", [](MemoryDisk* disk, const std::string& path) {
                       disk->Remove(AT_FDCWD, path);
                     }});
  for (bool full : {false, true}) {
    damages.push_back({full ? "full folder" : "folder",
                       [full](MemoryDisk* disk, const std::string& path) {
                         disk->Remove(AT_FDCWD, path);
                         ASSERT_EQ(disk->MakeFolder(AT_FDCWD, path), 0);
                         if (full) {
                           disk->Close(disk->Open(AT_FDCWD, path + "/mine",
                                                  O_CREAT | O_RDWR));
                         }
                       }});
  }
  return damages;
}

// Whatever the damage and whichever the file, in the folder of a run's step:
// the checkpoint there is not whole, the next save takes its place, and it can
// be removed.
TEST_F(CheckpointFolderTest, EachDamageOfEachFileOfAStepMakesWay) {
  const std::string path = "/run/step-00000002";
  for (const Damage& damage : Damages()) {
    for (const char* which : {"manifest", "rank-00000", "rank-00001", "lock"}) {
      SCOPED_TRACE(absl::StrCat(damage.name, " for ", which));
      for (bool remove : {false, true}) {
        MemoryDisk disk;
        TESSERA_ASSERT_OK(old_.Save(path, &disk, kRanks, &committed_));
        for (const auto& [name, bytes] : disk.FilesIn(path)) {
          if (absl::EndsWith(name, which)) {
            damage.make(&disk, absl::StrCat(path, "/", name));
          }
        }
        const absl::Status found = old_.Compare(path, &disk, 1);
        // A flip between pieces is not read; a lock says nothing.
        if (strcmp(which, "manifest") == 0) {
          EXPECT_THAT(found, StatusIs(damage.name == "gone"
                                          ? absl::StatusCode::kNotFound
                                          : absl::StatusCode::kDataLoss));
        } else {
          EXPECT_TRUE(found.ok() || absl::IsDataLoss(found)) << found;
        }
        if (remove) {
          const absl::Status removed = RemoveCheckpoint(path, &disk);
          EXPECT_TRUE(removed.ok() || damage.name == "gone") << removed;
          const bool any =
              Folder::Open(path, &disk).ok() && damage.name != "gone";
          EXPECT_EQ(any, damage.name == "full folder");
        }
        TESSERA_EXPECT_OK(new_.Save(path, &disk, kRanks, &committed_));
        TESSERA_EXPECT_OK(new_.Compare(path, &disk, 2));
        TESSERA_EXPECT_OK(old_.Save(path, &disk, kRanks, &committed_));
        size_t ours = 0;
        for (const auto& [name, bytes] : disk.FilesIn(path)) {
          ours += absl::StrContains(name, ".aside-") ? 0 : 1;
        }
        EXPECT_EQ(ours, kRanks + 2u);
      }
    }
  }
}

// Elsewhere what stands beside data files was a manifest, too; a user's own
// file of that name stays (AManifestThatIsNoneIsNotReplaced).
TEST_F(CheckpointFolderTest, AManifestBesideDataFilesWasOne) {
  auto disk = WithOld();
  const int fd =
      disk->Open(AT_FDCWD, absl::StrCat(kPath, "/", kManifestName), O_RDWR);
  disk->Write(fd, std::string(8, '\0').data(), 8, 0);
  disk->Close(fd);
  EXPECT_THAT(Folder::Open(kPath, disk.get()).ok()
                  ? ReadManifest(*Folder::Open(kPath, disk.get())).status()
                  : absl::OkStatus(),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("is no manifest of a checkpoint, so")));
  ExpectCleanAfterNext(disk.get());
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

// Its files may be all that is left.
TEST_F(CheckpointFolderTest, FilesOfADamagedManifestAreKept) {
  auto disk = WithOld();
  const int fd =
      disk->Open(AT_FDCWD, absl::StrCat(kPath, "/", kManifestName), O_RDWR);
  disk->Write(fd, "x", 1, 30);
  disk->Close(fd);
  const size_t files = disk->FilesIn(kPath).size();
  TESSERA_ASSERT_OK(Saving::Begin(kPath, disk.get()).status());
  EXPECT_EQ(disk->FilesIn(kPath).size(), files);
  ExpectCleanAfterNext(disk.get());
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
