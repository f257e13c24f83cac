#include "base/memory/memfd.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
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

// Else whoever has the descriptor could take pages from under the others.
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
