#include "base/thread/thread_stacks.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {

// The function is looked for by name, so it must not be inlined or unnamed.
__attribute__((noinline)) void SitInHere(absl::Notification* here,
                                         absl::Notification* end) {
  here->Notify();
  end->WaitForNotification();
  asm volatile("");  // no tail call
}

__attribute__((noinline)) void SpinInThere(absl::Notification* here,
                                           std::atomic<bool>* end) {
  here->Notify();
  while (!*end) {
  }
  asm volatile("");
}

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Returns the text under the thread of that name.
std::string SectionOf(const std::string& text, const std::string& name) {
  for (absl::string_view section : absl::StrSplit(text, "thread ")) {
    if (absl::StrContains(section, absl::StrCat("\"", name, "\""))) {
      return std::string(section);
    }
  }
  return "";
}

class ThreadStacksTest : public testing::Test {
 protected:
  ThreadStacksTest() {
    sitter_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "sitter");
      SitInHere(&sits_, &end_);
    });
    spinner_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "spinner");
      SpinInThere(&spins_, &stop_);
    });
    deaf_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "deaf");
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, nullptr);
      SitInHere(&deaf_sits_, &end_);
      // A signal that was left pending would end the process here.
      sigemptyset(&all);
      pthread_sigmask(SIG_SETMASK, &all, nullptr);
    });
    sits_.WaitForNotification();
    spins_.WaitForNotification();
    deaf_sits_.WaitForNotification();
  }
  ~ThreadStacksTest() override {
    stop_ = true;
    end_.Notify();
    for (std::thread* thread : {&sitter_, &spinner_, &deaf_}) thread->join();
  }

  absl::Notification sits_, spins_, deaf_sits_, end_;
  std::atomic<bool> stop_{false};
  std::thread sitter_, spinner_, deaf_;
};

TEST_F(ThreadStacksTest, NamesTheFunctionsOfEveryThread) {
  const std::string text = AllThreadStacks(absl::Seconds(20));
  EXPECT_THAT(
      SectionOf(text, "sitter"),
      AllOf(HasSubstr("tessera::SitInHere()"), Not(HasSubstr("Record"))));
  EXPECT_THAT(SectionOf(text, "spinner"), HasSubstr("tessera::SpinInThere()"));
  EXPECT_THAT(SectionOf(text, "deaf"),
              AllOf(HasSubstr("did not answer"), Not(HasSubstr("#0"))));
  EXPECT_THAT(text, HasSubstr("the one that writes this\n  #0 "));
  EXPECT_THAT(text, HasSubstr("AllThreadStacks"));
}

TEST_F(ThreadStacksTest, LeavesTheSignalAsItWas) {
  static std::atomic<int> mine{0};
  struct sigaction action = {};
  action.sa_handler = [](int) { ++mine; };
  sigaction(SIGRTMAX - 3, &action, nullptr);
  AllThreadStacks(absl::Seconds(20));
  EXPECT_EQ(mine, 0);
  raise(SIGRTMAX - 3);
  EXPECT_EQ(mine, 1);
  signal(SIGRTMAX - 3, SIG_DFL);
}

TEST_F(ThreadStacksTest, EndsByItsDeadline) {
  const absl::Time begin = absl::Now();
  const std::string text = AllThreadStacks(absl::ZeroDuration());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_THAT(SectionOf(text, "sitter"), HasSubstr("did not answer"));
}

TEST_F(ThreadStacksTest, ManyTimesFromManyThreads) {
  std::thread other([] {
    for (int i = 0; i < 5; ++i) AllThreadStacks();
  });
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(SectionOf(AllThreadStacks(absl::Seconds(20)), "sitter"),
                HasSubstr("tessera::SitInHere()"));
  }
  other.join();
}

}  // namespace
}  // namespace tessera
