// What SwapFile says of disks that fail, are full or lie.
#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_system.h"
#include "offload/disk/swap_test_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST_P(SwapFileTest, AFullDiskIsSaidByAllocate) {
  const auto file = Open();
  system_.fallocate_error = ENOSPC;
  system_.fs_free = 12345;
  EXPECT_THAT(
      file->Allocate(5000),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("[rank 3]"), HasSubstr(folder_.path()),
                     HasSubstr("8192 bytes more"), HasSubstr("12345 bytes"),
                     HasSubstr("nvme_path"))));
  system_.fallocate_error = EOPNOTSUPP;
  ExpectRoundTrip(file.get(), 5000, 0);
}

// As the file system says how much it has, not as it gives.
TEST_P(SwapFileTest, SpareRoomLeavesHalfOfTheDisk) {
  const auto file = Open();
  system_.fs_free = 8 * 8192;
  const auto full = StatusIs(absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(file->AllocateSpare(5 * 8192), full);
  TESSERA_ASSERT_OK_AND_ASSIGN(const SwapExtent spare,
                               file->AllocateSpare(4 * 8192));
  system_.fs_free = 4 * 8192;
  EXPECT_THAT(file->AllocateSpare(8192), full);
  TESSERA_EXPECT_OK(file->Allocate(8192));
  file->Free(spare);
  system_.fs_free = 0;
  TESSERA_EXPECT_OK(file->AllocateSpare(8192));  // the file has it already
}

TEST_P(SwapFileTest, AnErrorOfTheDiskEndsItsRequestAlone) {
  const auto file = Open();
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(9 * kBlock));
  for (const bool refused : {false, true}) {
    const Memory memory(9 * kBlock, 1);
    system_.answer = [=](bool write, int64_t offset, int64_t result) {
      return write == refused && offset == extent.begin + kBlock ? -EIO
                                                                 : result;
    };
    const auto write =
        file->Write(extent, 0, memory.data(), memory.bytes(), "states of x");
    const absl::Status written = write.Wait();
    const absl::Status read =
        file->Read(extent, 0, memory.data(), memory.bytes(), "states of x")
            .Wait();
    TESSERA_EXPECT_OK(refused ? read : written);
    EXPECT_THAT(
        refused ? written : read,
        StatusIs(absl::StatusCode::kUnavailable,
                 HasSubstr(absl::StrCat(
                     "[rank 3] ", refused ? "writing" : "reading",
                     " 73728 bytes of states of x ", refused ? "to" : "from",
                     " the swap file in ", folder_.path(),
                     " failed at byte 8192: Input/output error; "))));
    EXPECT_THAT(write.Wait(), written);  // again
    ExpectRoundTrip(file.get(), 9 * kBlock, 0);
  }
}

TEST_P(SwapFileTest, ShortAndInterruptedCallsGoOn) {
  options_.checksums = true;
  const auto file = Open();
  std::atomic<int64_t> calls{0};
  system_.answer = [&](bool, int64_t, int64_t result) -> int64_t {
    switch (calls++ % 4) {
      case 0:
        return -EINTR;
      case 1:
        return -EAGAIN;
      case 2:
        return result > kSwapAlignment ? kSwapAlignment + 10 : result;
      default:
        return result;
    }
  };
  ExpectRoundTrip(file.get(), 9 * kBlock + 3, 0);
  ExpectRoundTrip(file.get(), 9 * kBlock + 3, 1);
}

TEST_P(SwapFileTest, AWriteThatDoesNotMoveFails) {
  const auto file = Open();
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(kBlock));
  const Memory memory(kBlock);
  for (const int64_t moved : {0, 10}) {
    system_.answer = [=](bool, int64_t, int64_t) { return moved; };
    EXPECT_THAT(file->Write(extent, 0, memory.data(), kBlock, "a").Wait(),
                StatusIs(absl::StatusCode::kUnavailable));
  }
}

TEST_P(SwapFileTest, ATruncatedFileIsDataLoss) {
  const auto file = Open();
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(4 * kBlock));
  const Memory memory(4 * kBlock);
  TESSERA_EXPECT_OK(
      file->Write(extent, 0, memory.data(), memory.bytes(), "a").Wait());
  for (const int64_t left : {2 * kBlock + 1000, 2 * kBlock}) {
    ASSERT_EQ(ftruncate(system_.fd, left), 0);
    EXPECT_THAT(
        file->Read(extent, 0, memory.data(), memory.bytes(), "a").Wait(),
        StatusIs(absl::StatusCode::kDataLoss,
                 AllOf(HasSubstr("[rank 3]"), HasSubstr("truncated"))));
  }
  TESSERA_EXPECT_OK(
      file->Read(extent, 0, memory.data(), 2 * kBlock, "a").Wait());
}

TEST_P(SwapFileTest, AChangedByteIsDataLoss) {
  options_.checksums = true;
  const auto file = Open();
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(4 * kBlock));
  const Memory memory(4 * kBlock), page(kSwapAlignment);
  const auto read = [&](int64_t offset, int64_t bytes) {
    return file->Read(extent, offset, memory.data(), bytes, "moments of x")
        .Wait();
  };
  memory.Fill(1);
  TESSERA_ASSERT_OK(
      file->Write(extent, 0, memory.data(), memory.bytes(), "a").Wait());
  ASSERT_EQ(pwrite(system_.fd, page.data(), kSwapAlignment,
                   extent.begin + 2 * kBlock),
            kSwapAlignment);
  EXPECT_THAT(read(0, 4 * kBlock),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("rank 3"), HasSubstr("moments of x"),
                             HasSubstr("checksum"),
                             HasSubstr(absl::StrCat("byte ", 2 * kBlock)))));
  // The damage is also found where the blocks of the read are not those of the
  // write.
  EXPECT_THAT(read(kSwapAlignment, 4 * kBlock - kSwapAlignment),
              StatusIs(absl::StatusCode::kDataLoss));
  TESSERA_EXPECT_OK(read(0, 2 * kBlock));
  // What is written anew is whole again.
  TESSERA_EXPECT_OK(
      file->Write(extent, 2 * kBlock + kSwapAlignment, memory.data(), 10, "a")
          .Wait());
  TESSERA_EXPECT_OK(read(0, 4 * kBlock));
}

TEST_P(SwapFileTest, ALimitOfFileSizesIsSaidByAllocate) {
  const auto file = Open();
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 3 * kSwapAlignment;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const auto extent = file->Allocate(4 * kSwapAlignment);
  const auto fits = file->Allocate(3 * kSwapAlignment);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(extent, StatusIs(absl::StatusCode::kResourceExhausted,
                               AllOf(HasSubstr("16384 bytes more"),
                                     HasSubstr("File too large"))));
  TESSERA_EXPECT_OK(fits);
}

}  // namespace
}  // namespace tessera
