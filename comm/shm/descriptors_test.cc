#include "comm/shm/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/thread/no_threads_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

std::atomic<int> failed_accepts{0};
std::atomic<int> interruptions{0};  // of the calls to come

bool Interrupted() {
  if (interruptions <= 0) return false;
  --interruptions;
  errno = EINTR;
  return true;
}

}  // namespace

// Instead of libc's.
extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  if (Interrupted()) return -1;
  return static_cast<int>(syscall(SYS_connect, fd, address, size));
}
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (Interrupted()) return -1;
  return syscall(SYS_recvmsg, fd, message, flags);
}
extern "C" int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  const auto accepted = syscall(SYS_accept4, fd, address, size, flags);
  if (accepted < 0) ++failed_accepts;
  return static_cast<int>(accepted);
}

namespace tessera::shm {
namespace {

using ::testing::HasSubstr;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr absl::Duration kPatience = absl::Seconds(20);

int64_t OpenDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

// Offers `offered` descriptors and one byte, and takes what is `expected`.
absl::Status Exchange(int offered, int expected, int expected_bytes) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto offer,
      DescriptorOffer::Start(std::vector<int>(offered, STDERR_FILENO), "m", 1));
  std::string bytes(expected_bytes, 0);
  std::vector<int> descriptors(expected);
  TESSERA_RETURN_IF_ERROR(
      TakeDescriptors(offer->name(), kPatience, &bytes, &descriptors));
  for (int fd : descriptors) close(fd);
  return absl::OkStatus();
}

TEST(DescriptorsTest, WithoutAThreadNothingIsOffered) {
  const NoThreads none;
  EXPECT_THAT(DescriptorOffer::Start({STDERR_FILENO}, "m", 1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("tessera-offer")));
}

TEST(DescriptorsTest, AnInterruptionIsNoError) {
  for (const int count : {1, 3}) {
    interruptions = count;
    TESSERA_EXPECT_OK(Exchange(1, 1, 1));
    EXPECT_EQ(interruptions, 0);
  }
}

TEST(DescriptorsTest, NoneIsKeptOfAMessageThatIsNotWhatWasExpected) {
  const int64_t before = OpenDescriptors();
  TESSERA_EXPECT_OK(Exchange(2, 2, 1));
  EXPECT_EQ(OpenDescriptors(), before);
  const int kWrong[][3] = {{1, 1, 2}, {1, 2, 1}, {2, 1, 1}, {4, 1, 1}};
  for (const auto& [offered, expected, bytes] : kWrong) {
    EXPECT_THAT(Exchange(offered, expected, bytes),
                StatusIs(kUnavailable, HasSubstr("it sent no memory")));
    EXPECT_EQ(OpenDescriptors(), before) << offered << expected << bytes;
  }
}

// Who asks then waits, and poll has nothing to wait for. The time has a lower
// limit only, which no slow machine can miss.
TEST(DescriptorsTest, AnOfferWithoutDescriptorsLeftTriesAgainNowAndThen) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto offer,
                               DescriptorOffer::Start({STDERR_FILENO}, "m", 1));
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  close(next);
  // One is left, to the socket of who asks.
  const rlimit limit = {static_cast<rlim_t>(next + 1), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &limit);
  absl::Status taken;
  std::thread taker([&] {
    std::string bytes(1, 0);
    std::vector<int> descriptors(1);
    taken = TakeDescriptors(offer->name(), kPatience, &bytes, &descriptors);
    if (taken.ok()) close(descriptors[0]);
  });
  const absl::Duration begin = MonotonicNow();
  constexpr int kTries = 5;
  while (failed_accepts < kTries && MonotonicNow() - begin < kPatience) {
    std::this_thread::yield();
  }
  const absl::Duration took = MonotonicNow() - begin;
  setrlimit(RLIMIT_NOFILE, &before);
  taker.join();
  EXPECT_GE(failed_accepts, kTries);
  EXPECT_GE(took, (kTries - 1) * absl::Milliseconds(10));
  TESSERA_EXPECT_OK(taken);
}

// A listener whose queue is full: connecting to it blocks.
TEST(DescriptorsTest, ConnectingEndsInTime) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = absl::StrCat("tessera-test-", getpid());
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int first = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const absl::Cleanup close_both = [=] {
    close(listener);
    close(first);
  };
  ASSERT_EQ(bind(listener, to, size), 0);
  ASSERT_EQ(listen(listener, 0), 0);
  ASSERT_EQ(connect(first, to, size), 0);
  std::string bytes(1, 0);
  std::vector<int> descriptors(1);
  EXPECT_THAT(
      TakeDescriptors(name, absl::Milliseconds(20), &bytes, &descriptors),
      StatusIs(kUnavailable, HasSubstr("connecting to its local socket")));
}

}  // namespace
}  // namespace tessera::shm
