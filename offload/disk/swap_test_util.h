// For tests of SwapFile: a folder that goes, memory at odd places, and a system
// that refuses calls.
#ifndef OFFLOAD_DISK_SWAP_TEST_UTIL_H_
#define OFFLOAD_DISK_SWAP_TEST_UTIL_H_

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_system.h"

namespace tessera {

inline constexpr int64_t kBlock = 2 * kSwapAlignment;

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
  int64_t FsFree(int /*fd*/) override { return fs_free; }
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
  int64_t fs_free = int64_t{1} << 40;
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

class SwapFolder {
 public:
  SwapFolder() {
    path_ = ::testing::TempDir() + "/swap-XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~SwapFolder() {
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

  SwapFolder folder_;
  TestSystem system_{GetParam()};
  SwapOptions options_ = Options();
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_TEST_UTIL_H_
