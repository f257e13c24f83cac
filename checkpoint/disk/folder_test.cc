#include "checkpoint/disk/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FolderTest : public testing::Test {
 protected:
  FolderTest() {
    std::string pattern = testing::TempDir() + "/folder_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~FolderTest() override { fs::remove_all(path_); }

  Folder Opened() { return Folder::Open(path_, FileSystem::Real()).value(); }

  std::string path_;
};

TEST_F(FolderTest, WritesReadsRenamesRemoves) {
  const Folder folder = Opened();
  {
    const absl::StatusOr<File> file = folder.CreateFile("a");
    TESSERA_ASSERT_OK(file.status());
    TESSERA_ASSERT_OK(file->WriteAt(0, "hello"));
    TESSERA_ASSERT_OK(file->WriteAt(7, "there"));
    TESSERA_ASSERT_OK(file->Sync());
  }
  TESSERA_ASSERT_OK(folder.Rename("a", "b"));
  TESSERA_ASSERT_OK(folder.Sync());
  EXPECT_THAT(folder.Names(), IsOkAndHolds(ElementsAre("b")));
  const absl::StatusOr<File> file = folder.OpenFile("b");
  TESSERA_ASSERT_OK(file.status());
  EXPECT_EQ(file->bytes(), 12);
  std::string bytes(12, '?');
  TESSERA_ASSERT_OK(file->ReadAt(0, bytes.data(), 12));
  EXPECT_EQ(bytes, std::string("hello\0\0there", 12));
  EXPECT_THAT(file->ReadAt(8, bytes.data(), 5),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr(path_ + "/b: ends at byte 12")));
  TESSERA_ASSERT_OK(folder.Remove("b"));
  TESSERA_ASSERT_OK(folder.Remove("b"));
  EXPECT_THAT(folder.OpenFile("b").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path_ + "/b")));
}

// The system's, with a count of the descriptors that are more than O_PATH.
class CountedOpens : public FileSystem {
 public:
  int Open(int folder, const std::string& name, int flags) override {
    opens += (flags & (O_PATH | O_DIRECTORY)) == 0 ? 1 : 0;
    return FileSystem::Open(folder, name, flags);
  }
  int Reopen(int fd, int flags) override {
    ++opens;
    return FileSystem::Reopen(fd, flags);
  }
  int opens = 0;
};

TEST_F(FolderTest, OnlyRegularFilesAreOpened) {
  ASSERT_EQ(mkfifo((path_ + "/fifo").c_str(), 0600), 0);
  fs::create_directory(path_ + "/folder");
  std::ofstream(path_ + "/file") << "x";
  fs::create_symlink(path_ + "/file", path_ + "/link");
  fs::create_symlink("/dev/zero", path_ + "/device");
  fs::create_symlink("nowhere", path_ + "/dangling");
  fs::create_symlink("loop", path_ + "/loop");
  CountedOpens files;
  const Folder folder = Folder::Open(path_, &files).value();
  const auto expect_not = [&](const char* name, const absl::Status& status,
                              const char* why) {
    EXPECT_THAT(
        status,
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 HasSubstr(absl::StrCat(path_, "/", name, ": is ", why))));
  };
  for (const char* name :
       {"fifo", "folder", "link", "device", "dangling", "loop"}) {
    const bool special = fs::is_symlink(fs::symlink_status(path_ + "/" + name));
    for (const absl::Status& status :
         {folder.OpenFileToWrite(name).status(),
          folder.OpenOrCreateFile(name).status()}) {
      expect_not(name, status,
                 special ? "a symbolic link, and is not written through"
                         : "no regular file");
    }
  }
  for (const char* name : {"fifo", "folder", "device"}) {
    expect_not(name, folder.OpenFile(name).status(), "no regular file");
  }
  // The error is not NotFound, since the link's target may be only unmounted.
  for (const char* name : {"dangling", "loop"}) {
    expect_not(name, folder.OpenFile(name).status(),
               "a symbolic link that leads to nothing");
  }
  EXPECT_EQ(files.opens, 0);
  TESSERA_EXPECT_OK(folder.OpenFile("file").status());
  TESSERA_EXPECT_OK(folder.OpenFile("link").status());
  EXPECT_EQ(files.opens, 2);
  EXPECT_THAT(folder.CreateFile("file").status(),
              StatusIs(absl::StatusCode::kAlreadyExists));
  EXPECT_THAT(Folder::Open(path_ + "/file", FileSystem::Real()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("is not a folder")));
}

// Beyond RLIMIT_FSIZE, as root has it too: an error, and no signal is left to
// end the process later.
TEST_F(FolderTest, AFileThatMayNotGrow) {
  const File file = Opened().CreateFile("file").value();
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  static volatile sig_atomic_t ends = 0;
  const auto handler = signal(SIGXFSZ, [](int) { ends = 1; });
  const rlimit small = {1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = file.WriteAt(0, std::string(3000, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(ends, 0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
  sigset_t mask, pending;
  sigprocmask(SIG_BLOCK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGXFSZ), 0);
  sigpending(&pending);
  EXPECT_EQ(sigismember(&pending, SIGXFSZ), 0);
  TESSERA_EXPECT_OK(file.WriteAt(0, std::string(3000, 'x')));
}

// The name leads to another file when it is opened than when it was looked at.
TEST_F(FolderTest, AnotherFileInThePlaceOfTheOneThatIsOpened) {
  class Replacing : public FileSystem {
   public:
    int Reopen(int fd, int flags) override {
      fs::remove(path);
      mkfifo(path.c_str(), 0600);
      return without_proc ? -ENOENT : FileSystem::Reopen(fd, flags);
    }
    std::string path;
    bool without_proc = false;
  };
  Replacing files;
  files.path = path_ + "/file";
  const Folder folder = Folder::Open(path_, &files).value();
  for (bool without_proc : {false, true}) {
    fs::remove(files.path);
    std::ofstream(files.path) << "abc";
    files.without_proc = without_proc;
    const absl::StatusOr<File> file = folder.OpenFile("file");
    if (without_proc) {
      EXPECT_THAT(file.status(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                          HasSubstr("is no regular file")));
      continue;
    }
    TESSERA_ASSERT_OK(file.status());
    char byte = 0;
    TESSERA_EXPECT_OK(file->ReadAt(2, &byte, 1));
    EXPECT_EQ(byte, 'c');
  }
}

// Its files are those of the folder that was opened, whatever has its name.
TEST_F(FolderTest, AnotherFolderInItsPlace) {
  fs::create_directory(path_ + "/a");
  const Folder folder = Folder::Open(path_ + "/a", FileSystem::Real()).value();
  fs::rename(path_ + "/a", path_ + "/b");
  fs::create_directory(path_ + "/a");
  TESSERA_ASSERT_OK(folder.CreateFile("file").status());
  EXPECT_TRUE(fs::exists(path_ + "/b/file"));
  EXPECT_FALSE(fs::exists(path_ + "/a/file"));
}

TEST_F(FolderTest, ALockDiesWithItsHolder) {
  const Folder folder = Opened();
  {
    const File held = folder.OpenOrCreateFile("lock").value();
    TESSERA_ASSERT_OK(held.Lock());
    EXPECT_THAT(folder.OpenOrCreateFile("lock")->Lock(),
                StatusIs(absl::StatusCode::kAlreadyExists));
  }
  const File next = folder.OpenOrCreateFile("lock").value();
  TESSERA_EXPECT_OK(next.Lock());
  TESSERA_ASSERT_OK(folder.Remove("lock"));
  EXPECT_THAT(next.Lock(), StatusIs(absl::StatusCode::kAlreadyExists));
}

// The child is forked in the middle of a save and lives long after it, either
// by fork() or by a system call for which no handler runs.
TEST_F(FolderTest, AChildDoesNotHoldTheLock) {
  for (const bool plain : {true, false}) {
    const Folder folder = Opened();
    std::optional<File> held = folder.OpenOrCreateFile("lock").value();
    TESSERA_ASSERT_OK(held->Lock());
    const pid_t child =
        plain ? fork()
              : static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (child == 0) {
      while (true) pause();
    }
    held.reset();
    TESSERA_EXPECT_OK(folder.OpenOrCreateFile("lock")->Lock());
    kill(child, SIGKILL);
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
  }
}

// A child does not hold the lock of a holder that is killed, either, not even
// if it was forked between the opening of the file and the lock.
TEST_F(FolderTest, AChildDoesNotHoldTheLockOfWhoWasKilled) {
  for (const bool forks_first : {false, true}) {
    SCOPED_TRACE(forks_first ? "forks first" : "locks first");
    int orphan[2];
    ASSERT_EQ(pipe2(orphan, O_CLOEXEC), 0);
    const auto tell = [&](pid_t child) {
      if (write(orphan[1], &child, sizeof(child)) != sizeof(child)) _exit(2);
    };
    const pid_t holder = fork();
    if (holder == 0) {
      const File held = Opened().OpenOrCreateFile("lock").value();
      if (!forks_first && !held.Lock().ok()) _exit(1);
      const pid_t child = fork();
      // It has given up what it is not to have before fork() returns there.
      if (child == 0 && !forks_first) tell(getpid());
      if (child != 0 && forks_first) {
        if (!held.Lock().ok()) _exit(1);
        tell(child);
      }
      while (true) pause();
    }
    pid_t child = 0;
    ASSERT_EQ(read(orphan[0], &child, sizeof(child)),
              static_cast<ssize_t>(sizeof(child)));
    kill(holder, SIGKILL);
    EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
    TESSERA_EXPECT_OK(Opened().OpenOrCreateFile("lock")->Lock());
    EXPECT_EQ(kill(child, SIGKILL), 0);
    close(orphan[0]);
    close(orphan[1]);
  }
}

// Names of new folders are on the disk before anything is written there.
TEST(MakeFolderTest, StaysAfterAPowerFailure) {
  for (const char* path : {"/a/b/c", "/a/b/c/"}) {
    MemoryDisk disk;
    TESSERA_ASSERT_OK(Folder::Make(path, &disk).status());
    TESSERA_ASSERT_OK(Folder::Make(path, &disk).status());
    TESSERA_EXPECT_OK(
        Folder::Open("/a/b/c",
                     disk.AfterPowerFailure([](bool) { return false; }).get())
            .status());
  }
}

TEST(MemoryDiskTest, APowerFailureTearsWhatIsNotSynced) {
  MemoryDisk disk;
  const Folder folder = Folder::Make("/a", &disk).value();
  const File file = folder.CreateFile("file").value();
  TESSERA_ASSERT_OK(file.WriteAt(0, std::string(2048, 'a')));
  TESSERA_ASSERT_OK(file.Sync());
  TESSERA_ASSERT_OK(folder.Sync());
  TESSERA_ASSERT_OK(file.WriteAt(500, std::string(1600, 'b')));
  TESSERA_ASSERT_OK(file.WriteAt(2100, std::string(100, 'c')));
  const auto after = [&](const std::string& answers) {
    size_t i = 0;
    const auto disk_then =
        disk.AfterPowerFailure([&](bool) { return answers.at(i++) == '1'; });
    EXPECT_EQ(i, answers.size());
    return disk_then->FilesIn("/a").at("file");
  };
  // The answers are for the length, the five sectors of b and the one of c.
  EXPECT_EQ(after("0000000"), std::string(2048, 'a'));
  EXPECT_EQ(after("1111111"), std::string(500, 'a') + std::string(1600, 'b') +
                                  std::string(100, 'c'));
  EXPECT_EQ(after("0010000"), std::string(512, 'a') + std::string(512, 'b') +
                                  std::string(1024, 'a'));
  EXPECT_EQ(after("0000001"), std::string(2048, 'a') + std::string(52, '\0') +
                                  std::string(100, 'c'));
  EXPECT_EQ(after("1000010"), std::string(2048, 'a') + std::string(52, 'b') +
                                  std::string(100, '\0'));
}

TEST(MakeFolderTest, WhatItIsRefusedIsTold) {
  for (int64_t k = 0;; ++k) {
    MemoryDisk disk;
    TESSERA_ASSERT_OK(Folder::Make("/a", &disk).status());
    const int64_t first = disk.calls();
    disk.before = [&](int64_t call, const char*) {
      return call == first + k ? int64_t{-EMFILE} : 0;
    };
    const absl::Status status = Folder::Make("/a/b/c", &disk).status();
    if (disk.calls() - first <= k) break;
    EXPECT_THAT(status.ToString(), HasSubstr("Too many open files"));
  }
}

// Root is refused nothing, so the disk refuses.
TEST(MakeFolderTest, OneInAFolderThatCannotBeRead) {
  MemoryDisk disk;
  TESSERA_ASSERT_OK(Folder::Make("/a/b", &disk).status());
  const int64_t first = disk.calls();
  disk.before = [&](int64_t k, const char*) {
    return k == first ? int64_t{-EACCES} : 0;  // to open /a
  };
  TESSERA_EXPECT_OK(Folder::Make("/a/b", &disk).status());
  disk.before = [](int64_t k, const char* call) {
    return strcmp(call, "open") == 0 ? int64_t{-EACCES} : 0;
  };
  EXPECT_THAT(Folder::Make("/a/b", &disk).status(),
              StatusIs(absl::StatusCode::kPermissionDenied));
}

}  // namespace
}  // namespace tessera
