#include "base/memory/memfd.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr int64_t kBytes = 8 << 12;

// The flags that the kernel gives for the mapping at `data`.
std::string VmFlags(const char* data) {
  const std::string begin =
      absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(data)), "-");
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool found = false;
  while (std::getline(smaps, line)) {
    found |= absl::StartsWith(line, begin);
    if (found && absl::StartsWith(line, "VmFlags:")) return line + " ";
  }
  return "no such mapping";
}

// A dump would make a page of each hole.
TEST(Memfd, MappingsAreLeftOutOfCoreDumps) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const int fd, MakeMemfd("test", kBytes));
  for (bool writable : {true, false}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(char* const data,
                                 MapMemfd(fd, kBytes, writable));
    EXPECT_THAT(VmFlags(data), HasSubstr(" dd ")) << writable;
    munmap(data, kBytes);
  }
  close(fd);
}

TEST(Memfd, MoreThanTheLimitOfFilesIsAnError) {
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit = {kBytes - 1, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const absl::StatusOr<int> fd = MakeMemfd("test", kBytes);
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(fd, StatusIs(kUnavailable, AllOf(HasSubstr("32768 bytes"),
                                               HasSubstr("`ulimit -f`"))));
}

int64_t BytesTaken(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 ? info.st_blocks * int64_t{512} : -1;
}

// A folder in whose /proc the kernel's setting is `mode`.
std::string RootWithOvercommit(const char* mode) {
  const std::string root = absl::StrCat(::testing::TempDir(), "/mode", mode);
  const std::string folder = root + "/proc/sys/vm";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/overcommit_memory") << mode << "\n";
  return root;
}

// Where the account is strict, pages are there before they are written.
TEST(Memfd, PagesAreTakenUnderStrictAccountOnly) {
  for (const char* mode : {"0", "1", "2"}) {
    const bool strict = *mode == '2';
    const std::string root = RootWithOvercommit(mode);
    EXPECT_EQ(StrictOvercommit(root), strict) << mode;
    TESSERA_ASSERT_OK_AND_ASSIGN(const int fd, MakeMemfd("test", kBytes, root));
    EXPECT_EQ(BytesTaken(fd), strict ? kBytes : 0) << mode;
    close(fd);
  }
  EXPECT_FALSE(StrictOvercommit("/nowhere"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const int fd, MakeSparseMemfd("test", kBytes));
  EXPECT_EQ(BytesTaken(fd), 0);
  TESSERA_EXPECT_OK(TakePages(fd, kBytes / 2, kBytes / 2));
  EXPECT_EQ(BytesTaken(fd), kBytes / 2);
  close(fd);
}

// Pages that cannot be had: huge ones, of which there are not so many.
TEST(Memfd, PagesThatCannotBeHadAreAnError) {
  const int64_t bytes = int64_t{1} << 40;
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_HUGETLB);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, bytes), 0);
  EXPECT_THAT(TakePages(fd, 0, bytes),
              StatusIs(kUnavailable, HasSubstr("No space left")));
  EXPECT_EQ(BytesTaken(fd), 0);
  close(fd);
}

// Otherwise anyone with the descriptor could take pages from the others.
TEST(Memfd, NobodyChangesTheLength) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const int fd, MakeMemfd("test", kBytes));
  for (int64_t bytes : {kBytes / 2, kBytes * 2}) {
    EXPECT_EQ(ftruncate(fd, bytes), -1);
    EXPECT_EQ(errno, EPERM);
  }
  close(fd);
}

TEST(Memfd, AnotherLengthIsNotMapped) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const int fd, MakeMemfd("test", kBytes));
  EXPECT_THAT(MapMemfd(fd, 2 * kBytes, false),
              StatusIs(kUnavailable,
                       AllOf(HasSubstr("32768 bytes"), HasSubstr("65536"))));
  close(fd);
}

TEST(Memfd, ALengthThatMayChangeIsNotMapped) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  EXPECT_THAT(MapMemfd(fd, kBytes, false),
              StatusIs(kUnavailable, HasSubstr("not sealed")));
  close(fd);
}

}  // namespace
}  // namespace tessera
