#include "offload/disk/swap_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_system.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr int64_t kBlock = 2 * kSwapAlignment;

// Refuses what its fields say, of real calls.
class TestSystem : public SwapSystem {
 public:
  explicit TestSystem(bool uring) : uring_(uring) {}

  int Open(int folder, const std::string& name, int flags) override {
    if (!direct && (flags & O_DIRECT) != 0) return -EINVAL;
    const int result = SwapSystem::Open(folder, name, flags);
    if ((flags & O_CREAT) != 0) fd = result;
    return result;
  }
  int Fallocate(int of, int64_t begin, int64_t bytes) override {
    if (fallocate_error != 0) return -fallocate_error;
    return SwapSystem::Fallocate(of, begin, bytes);
  }
  int64_t FsFree(int /*fd*/) override { return 12345; }
  int64_t PRead(int of, char* to, int64_t bytes, int64_t offset) override {
    return Answer(false, offset, SwapSystem::PRead(of, to, bytes, offset));
  }
  int64_t PWrite(int of, const char* from, int64_t bytes,
                 int64_t offset) override {
    return Answer(true, offset, SwapSystem::PWrite(of, from, bytes, offset));
  }
  bool AllowsUring() override { return uring_; }
  int64_t Completed(bool write, int64_t offset, int64_t result) override {
    return Answer(write, offset, result);
  }

  bool direct = true;
  int fallocate_error = 0;
  int fd = -1;
  // As Completed; null: nothing is refused.
  std::function<int64_t(bool write, int64_t offset, int64_t result)> answer;

 private:
  int64_t Answer(bool write, int64_t offset, int64_t result) {
    return answer ? answer(write, offset, result) : result;
  }
  const bool uring_;
};

// Memory `shift` bytes off a multiple of kSwapAlignment.
class Memory {
 public:
  explicit Memory(int64_t bytes, int64_t shift = 0) : bytes_(bytes) {
    EXPECT_EQ(posix_memalign(&made_, kSwapAlignment,
                             static_cast<size_t>(bytes + shift + 1)),
              0);
    data_ = static_cast<char*>(made_) + shift;
    std::memset(data_, 0, static_cast<size_t>(bytes));
  }
  Memory(const Memory&) = delete;
  ~Memory() { free(made_); }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // No two places nearby, and no two seeds, have the same.
  void Fill(uint32_t seed) const {
    for (int64_t i = 0; i < bytes_; ++i) {
      seed = seed * 1664525 + 1013904223;
      data_[i] = static_cast<char>(seed >> 24);
    }
  }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ &&
           std::memcmp(data_, other.data_, static_cast<size_t>(bytes_)) == 0;
  }

 private:
  const int64_t bytes_;
  void* made_ = nullptr;
  char* data_ = nullptr;
};

class Folder {
 public:
  Folder() {
    path_ = ::testing::TempDir() + "/swap-XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~Folder() {
    for (const std::string& name : Names()) unlink(Path(name).c_str());
    rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> Names() const {
    SwapSystem* const real = SwapSystem::Real();
    const int fd = real->OpenFolder(path_);
    std::vector<std::string> names;
    EXPECT_EQ(real->List(fd, &names), 0);
    real->Close(fd);
    names.erase(
        std::remove_if(names.begin(), names.end(),
                       [](const std::string& name) { return name[0] == '.'; }),
        names.end());
    return names;
  }
  void Make(const std::string& name, bool old) const {
    std::ofstream(Path(name)) << "text";
    const timespec times[2] = {{1000, 0}, {1000, 0}};
    if (old) EXPECT_EQ(utimensat(AT_FDCWD, Path(name).c_str(), times, 0), 0);
  }

 private:
  std::string path_;
};

class SwapFileTest : public ::testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<SwapFile> Open() {
    options_.folder = folder_.path();
    auto file = SwapFile::Create(options_, &system_);
    TESSERA_EXPECT_OK(file);
    return *std::move(file);
  }
  // Writes, reads, compares.
  void ExpectRoundTrip(SwapFile* file, int64_t bytes, int64_t shift,
                       int64_t offset = 0, uint32_t seed = 1) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const SwapExtent extent,
                                 file->Allocate(offset + bytes));
    const Memory from(bytes, shift), to(bytes, shift);
    from.Fill(seed);
    TESSERA_EXPECT_OK(
        file->Write(extent, offset, from.data(), bytes, "a").Wait());
    TESSERA_EXPECT_OK(file->Read(extent, offset, to.data(), bytes, "a").Wait());
    EXPECT_TRUE(from == to) << bytes << " bytes, shift " << shift;
    file->Free(extent);
  }
  static SwapOptions Options() {
    SwapOptions options;
    options.owner = "rank 3";
    options.block_bytes = kBlock;
    options.queue_depth = 3;
    options.threads = 2;
    return options;
  }

  Folder folder_;
  TestSystem system_{GetParam()};
  SwapOptions options_ = Options();
};

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

TEST_P(SwapFileTest, AFullDiskIsSaidByAllocate) {
  const auto file = Open();
  system_.fallocate_error = ENOSPC;
  EXPECT_THAT(
      file->Allocate(5000),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("[rank 3]"), HasSubstr(folder_.path()),
                     HasSubstr("8192 bytes more"), HasSubstr("12345 bytes"),
                     HasSubstr("nvme_path"))));
  system_.fallocate_error = EOPNOTSUPP;
  ExpectRoundTrip(file.get(), 5000, 0);
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
  // The same where the blocks of the read are others than those of the write.
  EXPECT_THAT(read(kSwapAlignment, 4 * kBlock - kSwapAlignment),
              StatusIs(absl::StatusCode::kDataLoss));
  TESSERA_EXPECT_OK(read(0, 2 * kBlock));
  // What is written anew is whole again.
  TESSERA_EXPECT_OK(
      file->Write(extent, 2 * kBlock + kSwapAlignment, memory.data(), 10, "a")
          .Wait());
  TESSERA_EXPECT_OK(read(0, 4 * kBlock));
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

TEST_P(SwapFileTest, OnlyAbandonedFilesAreRemoved) {
  folder_.Make("tessera-swap-abc123", true);
  folder_.Make("tessera-swap-young1", false);
  folder_.Make("tessera-swap-locked", true);
  folder_.Make("tessera-swap-notes.txt", true);
  folder_.Make("other", true);
  ASSERT_EQ(mkdir(folder_.Path("tessera-swap-folder").c_str(), 0700), 0);
  SwapSystem* const real = SwapSystem::Real();
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
