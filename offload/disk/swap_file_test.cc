#include "offload/disk/swap_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_test_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

INSTANTIATE_TEST_SUITE_P(, SwapFileTest, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Uring" : "Threads";
                         });

TEST_P(SwapFileTest, BytesComeBack) {
  const auto file = Open();
  for (const int64_t shift : {0, 1, 512}) {
    for (const int64_t bytes :
         {int64_t{1}, kSwapAlignment - 1, kSwapAlignment, kSwapAlignment + 1,
          kBlock - 1, kBlock, kBlock + 1, 3 * kBlock, 9 * kBlock + 5000}) {
      ExpectRoundTrip(file.get(), bytes, shift);
      ExpectRoundTrip(file.get(), bytes, shift, 3 * kSwapAlignment);
    }
  }
}

TEST_P(SwapFileTest, BytesComeBackWithoutODirect) {
  system_.direct = false;
  const auto file = Open();
  EXPECT_THAT(file->Describe(), HasSubstr("through the system's caches"));
  ExpectRoundTrip(file.get(), 5 * kBlock + 7, 1);
  EXPECT_THAT(folder_.Names(), IsEmpty());
}

TEST_P(SwapFileTest, BytesComeBackHoweverBlocksAreSubmitted) {
  for (const bool single : {false, true}) {
    for (const bool overlap : {false, true}) {
      options_.single_submit = single;
      options_.overlap_events = overlap;
      options_.checksums = single;
      ExpectRoundTrip(Open().get(), 20 * kBlock + 7, 0);
    }
  }
}

TEST_P(SwapFileTest, NeighboursKeepTheirBytes) {
  const auto file = Open();
  const Memory around(3 * kSwapAlignment), inside(100, 1);
  around.Fill(1);
  inside.Fill(2);
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent,
                               file->Allocate(around.bytes()));
  TESSERA_EXPECT_OK(
      file->Write(extent, 0, around.data(), around.bytes(), "a").Wait());
  TESSERA_EXPECT_OK(
      file->Write(extent, kSwapAlignment, inside.data(), inside.bytes(), "a")
          .Wait());
  const Memory got(around.bytes());
  TESSERA_EXPECT_OK(file->Read(extent, 0, got.data(), got.bytes(), "a").Wait());
  EXPECT_EQ(std::memcmp(got.data(), around.data(), kSwapAlignment), 0);
  EXPECT_EQ(std::memcmp(got.data() + kSwapAlignment, inside.data(), 100), 0);
  EXPECT_EQ(std::memcmp(got.data() + 2 * kSwapAlignment,
                        around.data() + 2 * kSwapAlignment, kSwapAlignment),
            0);
}

// While the first is under way; each is two blocks.
TEST_P(SwapFileTest, UrgentReadsComeFirst) {
  options_.queue_depth = options_.threads = 1;
  options_.block_bytes = kSwapAlignment;
  absl::Notification began, go;
  std::vector<int64_t> blocks;
  system_.answer = [&](bool, int64_t offset, int64_t result) {
    blocks.push_back(offset / kSwapAlignment);
    if (blocks.size() == 1) {
      began.Notify();
      go.WaitForNotification();
    }
    return result;
  };
  const auto file = Open();
  const Memory memory(2 * kSwapAlignment);
  std::vector<SwapExtent> extents;
  for (int i = 0; i < 5; ++i) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const SwapExtent extent,
                                 file->Allocate(memory.bytes()));
    extents.push_back(extent);
  }
  std::vector<SwapFuture> futures;
  const auto read = [&](size_t i) {
    futures.push_back(
        file->Read(extents[i], 0, memory.data(), memory.bytes(), "a"));
  };
  const auto read_urgent = [&](size_t i) {
    futures.push_back(
        file->ReadUrgent(extents[i], 0, memory.data(), memory.bytes(), "a"));
  };
  read(0);
  began.WaitForNotification();
  read(1);
  read_urgent(2);
  futures.push_back(
      file->Write(extents[3], 0, memory.data(), memory.bytes(), "a"));
  read_urgent(4);
  go.Notify();
  for (const SwapFuture& future : futures) TESSERA_EXPECT_OK(future.Wait());
  EXPECT_THAT(blocks, ElementsAre(0, 4, 5, 8, 9, 1, 2, 3, 6, 7));
}

TEST_P(SwapFileTest, ManyThreadsHaveManyRequests) {
  options_.checksums = true;
  const auto file = Open();
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<SwapExtent> extents;
      std::vector<std::unique_ptr<Memory>> from, to;
      std::vector<SwapFuture> futures;
      for (uint32_t i = 0; i < 20; ++i) {
        const int64_t bytes = 1 + i * 1777 + t * kSwapAlignment;
        extents.push_back(*file->Allocate(bytes));
        from.push_back(std::make_unique<Memory>(bytes, i % 2));
        to.push_back(std::make_unique<Memory>(bytes, i % 3));
        from[i]->Fill(100 * t + i);
        futures.push_back(
            file->Write(extents[i], 0, from[i]->data(), bytes, "a"));
      }
      for (const SwapFuture& future : futures) TESSERA_EXPECT_OK(future.Wait());
      for (uint32_t i = 0; i < 20; ++i) {
        futures[i] =
            file->Read(extents[i], 0, to[i]->data(), to[i]->bytes(), "a");
      }
      for (uint32_t i = 0; i < 20; ++i) {
        TESSERA_EXPECT_OK(futures[i].Wait());
        EXPECT_TRUE(futures[i].Done());
        EXPECT_TRUE(*from[i] == *to[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const SwapStats stats = file->stats();
  EXPECT_EQ(stats.bytes_read, stats.bytes_written);
  EXPECT_GT(stats.reading, absl::ZeroDuration());
  EXPECT_GT(stats.writing, absl::ZeroDuration());
  EXPECT_LE(stats.busy, stats.reading + stats.writing);
}

TEST_P(SwapFileTest, RegisteredMemoryIsReadAndWritten) {
  const auto file = Open();
  const Memory from(2 * kBlock), to(2 * kBlock);
  from.Fill(7);
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(from.bytes()));
  const bool registered = file->Register(from.data(), from.bytes());
  EXPECT_EQ(file->Register(to.data(), to.bytes()), registered);
  EXPECT_EQ(absl::StrContains(file->Describe(), "registered"), registered);
  if (!GetParam()) EXPECT_FALSE(registered);
  EXPECT_FALSE(file->Register(from.data() + 1, 100));
  for (int i = 0; i < 2; ++i) {
    TESSERA_EXPECT_OK(
        file->Write(extent, 0, from.data(), from.bytes(), "a").Wait());
    std::memset(to.data(), 0, static_cast<size_t>(to.bytes()));
    TESSERA_EXPECT_OK(file->Read(extent, 0, to.data(), to.bytes(), "a").Wait());
    EXPECT_TRUE(from == to);
    file->Unregister(from.data());
    file->Unregister(to.data());
  }
  EXPECT_FALSE(absl::StrContains(file->Describe(), "registered"));
}

TEST_P(SwapFileTest, TheEndWaitsForWhatIsUnderWay) {
  const Memory from(50 * kBlock);
  for (const bool overlap : {false, true}) {
    options_.overlap_events = overlap;
    SwapFuture future;
    {
      const auto file = Open();
      TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent,
                                   file->Allocate(from.bytes()));
      future = file->Write(extent, 0, from.data(), from.bytes(), "a");
    }
    EXPECT_TRUE(future.Done());
    TESSERA_EXPECT_OK(future.Wait());
  }
}

TEST_P(SwapFileTest, NothingIsDoneAtOnce) {
  const auto file = Open();
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto extent, file->Allocate(0));
  EXPECT_TRUE(file->Write(extent, 0, nullptr, 0, "a").Done());
  TESSERA_EXPECT_OK(SwapFuture().Wait());
  file->Free(extent);
}

TEST_P(SwapFileTest, RoomIsUsedAgain) {
  const auto file = Open();
  std::vector<SwapExtent> extents;
  for (int i = 0; i < 4; ++i) {
    extents.push_back(*file->Allocate(kSwapAlignment - 5));
    EXPECT_EQ(extents[i].begin, i * kSwapAlignment);
    EXPECT_EQ(extents[i].bytes, kSwapAlignment);
  }
  file->Free(extents[0]);
  file->Free(extents[2]);
  file->Free(extents[1]);  // joins both
  EXPECT_EQ(file->Allocate(3 * kSwapAlignment)->begin, 0);
  EXPECT_EQ(file->stats().file_bytes, 4 * kSwapAlignment);
  file->Free(extents[3]);  // and what lies at the end only grows
  EXPECT_EQ(file->Allocate(2 * kSwapAlignment)->begin, 3 * kSwapAlignment);
  EXPECT_EQ(file->stats().file_bytes, 5 * kSwapAlignment);
}

TEST_P(SwapFileTest, AFileHasNoNameAndMeetsNoOther) {
  const auto one = Open(), two = Open();
  EXPECT_THAT(folder_.Names(), IsEmpty());
  const Memory a(kBlock), b(kBlock), got(kBlock);
  a.Fill(1);
  b.Fill(2);
  const SwapExtent extent = *one->Allocate(kBlock);
  EXPECT_EQ(two->Allocate(kBlock)->begin, extent.begin);
  TESSERA_EXPECT_OK(one->Write(extent, 0, a.data(), kBlock, "a").Wait());
  TESSERA_EXPECT_OK(two->Write(extent, 0, b.data(), kBlock, "b").Wait());
  TESSERA_EXPECT_OK(one->Read(extent, 0, got.data(), kBlock, "a").Wait());
  EXPECT_TRUE(got == a);
  TESSERA_EXPECT_OK(two->Read(extent, 0, got.data(), kBlock, "b").Wait());
  EXPECT_TRUE(got == b);
}

TEST_P(SwapFileTest, NobodyElseMayReadIt) {
  const auto file = Open();
  struct stat info = {};
  ASSERT_EQ(fstat(system_.fd, &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_P(SwapFileTest, OnlyAbandonedFilesAreRemoved) {
  folder_.Make("tessera-swap-abc123", true);
  folder_.Make("tessera-swap-young1", false);
  folder_.Make("tessera-swap-locked", true);
  folder_.Make("tessera-swap-notes.txt", true);
  folder_.Make("other", true);
  ASSERT_EQ(mkdir(folder_.Path("tessera-swap-folder").c_str(), 0700), 0);
  FileSystem* const real = FileSystem::Real();
  const int locked =
      open(folder_.Path("tessera-swap-locked").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(real->Lock(locked), 0);
  Open();
  EXPECT_THAT(folder_.Names(),
              UnorderedElementsAre("tessera-swap-young1", "tessera-swap-locked",
                                   "tessera-swap-notes.txt", "other",
                                   "tessera-swap-folder"));
  close(locked);
  Open();
  EXPECT_THAT(
      folder_.Names(),
      UnorderedElementsAre("tessera-swap-young1", "tessera-swap-notes.txt",
                           "other", "tessera-swap-folder"));
  rmdir(folder_.Path("tessera-swap-folder").c_str());
}

TEST_P(SwapFileTest, AFolderThatIsNoneIsSaid) {
  options_.folder = folder_.Path("missing");
  EXPECT_THAT(SwapFile::Create(options_, &system_),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("[rank 3]"), HasSubstr(options_.folder),
                             HasSubstr("nvme_path"))));
  folder_.Make("file", false);
  options_.folder = folder_.Path("file");
  EXPECT_THAT(
      SwapFile::Create(options_, &system_),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("file")));
}

TEST_P(SwapFileTest, OptionsAreChecked) {
  options_.folder = folder_.path();
  const SwapOptions good = options_;
  const auto expect_fault = [&](const char* name) {
    EXPECT_THAT(SwapFile::Create(options_, &system_),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)));
    options_ = good;
  };
  options_.block_bytes = kSwapAlignment + 1;
  expect_fault("aio.block_size");
  options_.queue_depth = 0;
  expect_fault("aio.queue_depth");
  options_.threads = 0;
  expect_fault("aio.intra_op_parallelism");
}

TEST_P(SwapFileTest, DescribesItself) {
  const std::string text = Open()->Describe();
  if (GetParam() && !absl::StrContains(text, "io_uring")) {
    GTEST_SKIP() << "this kernel has no io_uring: " << text;
  }
  EXPECT_EQ(absl::StrContains(text, "threads: 2"), !GetParam()) << text;
}

}  // namespace
}  // namespace tessera
