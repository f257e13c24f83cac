// For tests of SwapFile: a folder that goes, memory at odd places, and a system
// that refuses calls.
#ifndef OFFLOAD_DISK_SWAP_TEST_UTIL_H_
#define OFFLOAD_DISK_SWAP_TEST_UTIL_H_

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/disk/disk_ring.h"
#include "base/disk/file_system.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "testing/disk/faulty_files.h"

namespace tessera {

inline constexpr int64_t kBlock = 2 * kSwapAlignment;

// Refuses what its fields say, of real calls.
class TestSystem : public FaultyFiles {
 public:
  explicit TestSystem(bool uring)
      : FaultyFiles(FileSystem::Private()), uring_(uring) {}

  int Open(int folder, const std::string& name, int flags) override {
    if (!direct && (flags & O_DIRECT) != 0) return -EINVAL;
    const int result = FaultyFiles::Open(folder, name, flags);
    if ((flags & O_CREAT) != 0) fd = result;
    return result;
  }
  int Allocate(int of, int64_t begin, int64_t bytes) override {
    if (allocate_error != 0) return -allocate_error;
    return FaultyFiles::Allocate(of, begin, bytes);
  }
  int64_t FreeBytes(int /*fd*/) override { return fs_free; }
  std::unique_ptr<DiskRing> MakeRing(unsigned depth) override {
    return uring_ ? FaultyFiles::MakeRing(depth) : nullptr;
  }

  bool direct = true;
  int allocate_error = 0;
  int64_t fs_free = int64_t{1} << 40;
  int fd = -1;

 private:
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
    FileSystem* const real = FileSystem::Real();
    const int fd = real->Open(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY);
    std::vector<std::string> names;
    EXPECT_EQ(real->List(fd, &names), 0);
    real->Close(fd);
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
