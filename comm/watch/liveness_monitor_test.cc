// Who is told that the process of a rank has ended.
#include "comm/watch/liveness_monitor.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/thread/deadline.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/sockets.h"
#include "comm/watch/watch_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class LivenessTest : public WatchTest {
 protected:
  // `count` ranks have ended, as far as is known at `rank`.
  static bool Knows(const Announcements& rank, size_t count) {
    const Deadline deadline = Deadline::After(kEnough);
    while (rank.liveness().Ended().size() < count) {
      if (deadline.HasPassed()) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }
  void Restart(int world_size) {
    store_ = c10::make_intrusive<c10d::HashStore>();
    a_ = Join(0, world_size);
    b_ = Join(1, world_size);
  }
  Endpoint Rank0() {
    const std::string where = store_->get_to_str("liveness");
    const std::vector<std::string> words = absl::StrSplit(where, ' ');
    return ParseEndpoint(where, words[2]);
  }
  // Connects with rank 0 and says nothing.
  int Knock() {
    const int fd = ConnectTo("127.0.0.1", Rank0().port);
    TESSERA_CHECK(fd >= 0);
    return fd;
  }
  // Rank 0 has dealt with all that came before: what it finds together with the
  // first question it has dealt with at the second.
  static bool CaughtUp(const Announcements& rank) {
    return rank.liveness().Rank0Answers(kEnough) &&
           rank.liveness().Rank0Answers(kEnough);
  }
  static bool IsClosed(int fd) {
    char byte = 0;
    return WaitForSocket(
               fd, POLLIN,
               static_cast<int>(absl::ToInt64Milliseconds(kEnough))) &&
           recv(fd, &byte, 1, MSG_DONTWAIT) == 0;
  }
};

TEST_F(LivenessTest, ARankThatLeavesSaysSo) {
  EXPECT_TRUE(b_->liveness().Rank0Answers(kEnough));
  EXPECT_FALSE(a_->liveness().WaitForEnd(absl::Milliseconds(50)));
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(kEnough));
  ASSERT_THAT(a_->liveness().Ended(), SizeIs(1));
  EXPECT_EQ(a_->liveness().Ended()[0].rank, 1);
  EXPECT_TRUE(a_->liveness().Ended()[0].left);
}

TEST_F(LivenessTest, TheOthersHearOfItThroughRank0) {
  store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> ranks;
  for (int r = 0; r < 4; ++r) ranks.push_back(Join(r, 4));
  ranks[2] = nullptr;
  ASSERT_TRUE(ranks[3]->liveness().WaitForEnd(kEnough));
  EXPECT_EQ(ranks[3]->liveness().Ended()[0].rank, 2);
  ranks[0] = nullptr;
  ASSERT_TRUE(Knows(*ranks[1], 2));
  EXPECT_EQ(ranks[1]->liveness().Ended()[1].rank, 0);
  EXPECT_TRUE(ranks[1]->liveness().Ended()[1].left);
}

TEST_F(LivenessTest, AProcessThatVanishesIsGoneAndDidNotLeave) {
  store_ = c10::make_intrusive<c10d::HashStore>();
  a_ = Join(0, 3);
  b_ = Join(1, 3);
  clock_.Advance(absl::Seconds(77));
  Vanish(2);
  for (const auto* rank : {a_.get(), b_.get()}) {
    ASSERT_TRUE(Knows(*rank, 1));
    const EndedRank ended = rank->liveness().Ended()[0];
    EXPECT_EQ(ended.rank, 2);
    EXPECT_FALSE(ended.left);
    EXPECT_EQ(ended.since, clock_.Now());
  }
}

// It has none of what the others see its parent by; not even where rank 0
// listens for them.
TEST_F(LivenessTest, AForkedChildIsNotTakenForItsParent) {
  Restart(3);
  const std::string port = Rank0().port;
  const int rank2 = ConnectAs(2, Rank0(), "liveness");
  ASSERT_GE(rank2, 0);
  int forked[2];
  ASSERT_EQ(pipe(forked), 0);
  const pid_t child = fork();
  if (child == 0) {
    (void)!write(forked[1], "", 1);
    alarm(60);
    while (true) pause();
  }
  char done;
  ASSERT_EQ(read(forked[0], &done, 1), 1);
  close(forked[0]);
  close(forked[1]);
  close(rank2);  // as the kernel does at the end of a process
  EXPECT_TRUE(a_->liveness().WaitForEnd(kEnough));
  ASSERT_THAT(a_->liveness().Ended(), SizeIs(1));
  EXPECT_EQ(a_->liveness().Ended()[0].rank, 2);
  a_ = nullptr;
  EXPECT_EQ(ConnectTo("127.0.0.1", port), -1);
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

// A rank that gave up waiting for rank 0's answer, and came again.
TEST_F(LivenessTest, AHelloThatIsNotConfirmedIsOfNobody) {
  Restart(3);
  const int gave_up = Knock();
  EXPECT_FALSE(Introduce(gave_up, JobKey("liveness", Rank0().token), 2,
                         Deadline::After(absl::ZeroDuration()))
                   .ok());
  close(gave_up);
  std::unique_ptr<Announcements> c = Join(2, 3);
  ASSERT_TRUE(CaughtUp(*c));
  ASSERT_TRUE(CaughtUp(*b_));
  EXPECT_THAT(a_->liveness().Ended(), IsEmpty());
  EXPECT_THAT(b_->liveness().Ended(), IsEmpty());
  c = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(kEnough));
  EXPECT_EQ(a_->liveness().Ended()[0].rank, 2);
  EXPECT_TRUE(a_->liveness().Ended()[0].left);
}

TEST_F(LivenessTest, SilentStrangersAreDroppedAfterAWhile) {
  const int fd = Knock();
  ASSERT_TRUE(CaughtUp(*b_));
  clock_.Advance(absl::Seconds(10));
  EXPECT_TRUE(IsClosed(fd));
  close(fd);
  EXPECT_TRUE(CaughtUp(*b_));
  EXPECT_THAT(a_->liveness().Ended(), IsEmpty());
}

TEST_F(LivenessTest, OfManyStrangersTheOldestIsDropped) {
  std::vector<int> fds;
  for (int i = 0; i < 2 + 16 + 1; ++i) {
    fds.push_back(Knock());
    ASSERT_TRUE(CaughtUp(*b_));  // its queue is short
  }
  EXPECT_TRUE(IsClosed(fds[0]));
  EXPECT_TRUE(CaughtUp(*b_));
  EXPECT_FALSE(WaitForSocket(fds[1], POLLIN, 0));
  EXPECT_FALSE(WaitForSocket(fds.back(), POLLIN, 0));
  for (int fd : fds) close(fd);
  EXPECT_TRUE(CaughtUp(*b_));
  EXPECT_THAT(a_->liveness().Ended(), IsEmpty());
}

TEST_F(LivenessTest, AStrangersDescriptorIsGivenToARank) {
  Restart(3);
  const Endpoint rank0 = Rank0();
  const int stranger = Knock();
  ASSERT_TRUE(CaughtUp(*b_));
  clock_.Advance(absl::Seconds(1));
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = dup(stranger);
  close(next);
  // One is left, for the rank's own end.
  rlimit limit = before;
  limit.rlim_cur = next + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  const int fd = ConnectAs(2, rank0, "liveness");
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_GE(fd, 0);
  EXPECT_TRUE(IsClosed(stranger));
  close(stranger);
  if (fd >= 0) close(fd);
}

}  // namespace
}  // namespace tessera
