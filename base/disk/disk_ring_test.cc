#include "base/disk/disk_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr unsigned kDepth = 4;

class DiskRingTest : public testing::Test {
 protected:
  void SetUp() override {
    ring_ = DiskRing::Create(kDepth);
    if (ring_ == nullptr) GTEST_SKIP() << "this kernel forbids io_uring";
    const std::string path = absl::StrCat(testing::TempDir(), "disk_ring");
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ASSERT_GE(fd_, 0);
    for (int i = 0; i < 1000; ++i) absl::StrAppend(&bytes_, i, ",");
    ASSERT_EQ(pwrite(fd_, bytes_.data(), bytes_.size(), 0),
              static_cast<ssize_t>(bytes_.size()));
  }
  void TearDown() override {
    ring_.reset();
    if (fd_ >= 0) close(fd_);
  }

  // Begins to read 100 bytes.
  void Read(size_t tag, int fd, char* to, int64_t offset) {
    ring_->Begin(tag, {/*write=*/false, fd, to, 100, offset});
  }

  std::unique_ptr<DiskRing> ring_;
  int fd_ = -1;
  std::string bytes_;
};

TEST_F(DiskRingTest, ReadsAsManyAtOnceAsItHasPlaces) {
  std::vector<std::string> got(3 * kDepth, std::string(100, '\0'));
  size_t begun = 0;
  std::map<size_t, int64_t> results;
  while (results.size() < got.size()) {
    while (begun < got.size() && begun - results.size() < kDepth) {
      Read(begun, fd_, got[begun].data(), static_cast<int64_t>(begun) * 100);
      ++begun;
    }
    const DiskRing::Done done = ring_->Next();
    results[done.tag] = done.result;
  }
  EXPECT_TRUE(ring_->empty());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(results[i], 100);
    EXPECT_EQ(got[i], bytes_.substr(i * 100, 100));
  }
}

TEST_F(DiskRingTest, TheEndOfAFileAndErrorsAreAsOfRead) {
  const int64_t size = static_cast<int64_t>(bytes_.size());
  std::string got(100, '\0');
  Read(7, fd_, got.data(), size - 10);
  DiskRing::Done done = ring_->Next();
  EXPECT_EQ(done.tag, 7u);
  EXPECT_EQ(done.result, 10);
  Read(8, fd_, got.data(), size);
  EXPECT_EQ(ring_->Next().result, 0);
  Read(9, -1, got.data(), 0);
  EXPECT_EQ(ring_->Next().result, -EBADF);
}

TEST_F(DiskRingTest, ItsEndWaitsForWhatHasBegun) {
  std::string got(100, '\0');
  Read(0, fd_, got.data(), 0);
  ring_.reset();
  EXPECT_EQ(got, bytes_.substr(0, 100));
}

TEST_F(DiskRingTest, WhatIsWrittenIsReadFromRegisteredMemoryToo) {
  std::string from(100, 'x'), to(100, '\0');
  DiskRing::Request request = {/*write=*/true, fd_, from.data(), 100, 7};
  ring_->Begin(1, request);
  EXPECT_EQ(ring_->Next().result, 100);
  EXPECT_FALSE(ring_->HasRegistered());
  const bool registered = ring_->Register(to.data(), 100);  // if it is allowed
  EXPECT_EQ(ring_->HasRegistered(), registered);
  EXPECT_EQ(ring_->BufferOf(to.data() + 10, 90) >= 0, registered);
  EXPECT_EQ(ring_->BufferOf(to.data() + 10, 91), -1);
  request = {/*write=*/false, fd_, to.data() + 10, 90, 17};
  request.buffer = ring_->BufferOf(request.memory, request.bytes);
  ring_->Begin(2, request);
  EXPECT_EQ(ring_->Next().result, 90);
  EXPECT_EQ(to.substr(10), from.substr(10));
  ring_->Unregister(to.data());
  EXPECT_FALSE(ring_->HasRegistered());
}

TEST_F(DiskRingTest, IsWokenByAnotherThread) {
  ring_->Wake();  // before it listens
  ring_->Listen();
  EXPECT_EQ(ring_->Next().tag, DiskRing::kWoken);
  ring_->Listen();
  std::string got(100, '\0');
  Read(3, fd_, got.data(), 0);
  EXPECT_EQ(ring_->Next().tag, 3u);
  std::thread other([this] { ring_->Wake(); });
  EXPECT_EQ(ring_->Next().tag, DiskRing::kWoken);
  other.join();
}

}  // namespace
}  // namespace tessera
