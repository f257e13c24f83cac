#include "checkpoint/disk/read_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr unsigned kDepth = 4;

class ReadQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    queue_ = ReadQueue::Create(kDepth);
    if (queue_ == nullptr) GTEST_SKIP() << "this kernel forbids io_uring";
    const std::string path = absl::StrCat(testing::TempDir(), "read_queue");
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ASSERT_GE(fd_, 0);
    for (int i = 0; i < 1000; ++i) absl::StrAppend(&bytes_, i, ",");
    ASSERT_EQ(pwrite(fd_, bytes_.data(), bytes_.size(), 0),
              static_cast<ssize_t>(bytes_.size()));
  }
  void TearDown() override {
    queue_.reset();
    if (fd_ >= 0) close(fd_);
  }

  std::unique_ptr<ReadQueue> queue_;
  int fd_ = -1;
  std::string bytes_;
};

TEST_F(ReadQueueTest, ReadsAsManyAtOnceAsItHasPlaces) {
  std::vector<std::string> got(3 * kDepth, std::string(100, '\0'));
  size_t begun = 0;
  std::map<size_t, int64_t> results;
  while (results.size() < got.size()) {
    while (begun < got.size() && begun - results.size() < kDepth) {
      queue_->Begin(begun, fd_, got[begun].data(), 100,
                    static_cast<int64_t>(begun) * 100);
      ++begun;
    }
    const ReadQueue::Done done = queue_->Next();
    results[done.tag] = done.result;
  }
  EXPECT_TRUE(queue_->empty());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(results[i], 100);
    EXPECT_EQ(got[i], bytes_.substr(i * 100, 100));
  }
}

TEST_F(ReadQueueTest, TheEndOfAFileAndErrorsAreAsOfRead) {
  const int64_t size = static_cast<int64_t>(bytes_.size());
  std::string got(100, '\0');
  queue_->Begin(7, fd_, got.data(), 100, size - 10);
  ReadQueue::Done done = queue_->Next();
  EXPECT_EQ(done.tag, 7u);
  EXPECT_EQ(done.result, 10);
  queue_->Begin(8, fd_, got.data(), 100, size);
  EXPECT_EQ(queue_->Next().result, 0);
  queue_->Begin(9, -1, got.data(), 100, 0);
  EXPECT_EQ(queue_->Next().result, -EBADF);
}

TEST_F(ReadQueueTest, ItsEndWaitsForWhatHasBegun) {
  std::string got(100, '\0');
  queue_->Begin(0, fd_, got.data(), 100, 0);
  queue_.reset();
  EXPECT_EQ(got, bytes_.substr(0, 100));
}

}  // namespace
}  // namespace tessera
