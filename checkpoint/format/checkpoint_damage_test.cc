// Checkpoints of which files are damaged: what is found is an error, and the
// next save leaves a whole one.
#include <fcntl.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_folder_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace tessera
