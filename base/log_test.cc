#include "base/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

// Returns what `f` writes to stderr; a pipe holds at most 64 KiB.
std::string Stderr(const std::function<void()>& f) {
  ::testing::internal::CaptureStderr();
  f();
  return ::testing::internal::GetCapturedStderr();
}

class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override { SetLogRank(0, 0); }  // as if it was never set
};

TEST_F(LogTest, LineHasSeverityTimeFileAndLine) {
  EXPECT_THAT(Stderr([] { TESSERA_LOG(INFO) << "a " << 3; }),
              MatchesRegex("I [0-9]+:[0-9]+:[0-9]+\\.[0-9][0-9][0-9] "
                           "log_test\\.cc:[0-9]+] a 3\n"));
  EXPECT_THAT(Stderr([] { TESSERA_LOG(WARNING) << "x"; }),
              MatchesRegex("W .*] x\n"));
  EXPECT_THAT(Stderr([] { TESSERA_LOG(ERROR) << "x"; }),
              MatchesRegex("E .*] x\n"));
}

TEST_F(LogTest, RankAppearsOnceSet) {
  SetLogRank(3, 8);
  EXPECT_THAT(Stderr([] { TESSERA_LOG(INFO) << "x"; }),
              MatchesRegex("I [0-9:.]+ r3/8 log_test\\.cc:[0-9]+] x\n"));
}

TEST_F(LogTest, Rank0OnlyLogsOnRank0) {
  const auto log = [] { TESSERA_LOG_RANK0(INFO) << "once"; };
  EXPECT_THAT(Stderr(log), HasSubstr("once"));
  SetLogRank(0, 2);
  EXPECT_THAT(Stderr(log), AllOf(HasSubstr("once"), HasSubstr(" r0/2 ")));
  SetLogRank(1, 2);
  EXPECT_THAT(Stderr(log), IsEmpty());
}

TEST_F(LogTest, FatalAborts) {
  EXPECT_DEATH(TESSERA_LOG(FATAL) << "the end",
               "F .*log_test\\.cc:.*] the end");
}

TEST_F(LogTest, VlogFollowsLevelAndSkipsOperands) {
  int evaluated = 0;
  const auto log = [&](int level) {
    return Stderr([&] { TESSERA_VLOG(logtest, level) << ++evaluated; });
  };
  EXPECT_THAT(log(1), IsEmpty());
  EXPECT_EQ(evaluated, 0);
  TESSERA_ASSERT_OK(SetVerbosity("other,logtest=2"));
  EXPECT_THAT(log(2), HasSubstr("] 1\n"));
  EXPECT_THAT(log(3), IsEmpty());
  TESSERA_ASSERT_OK(SetVerbosity("logtest"));
  EXPECT_THAT(log(1), HasSubstr("] 2\n"));
  EXPECT_THAT(log(2), IsEmpty());
  TESSERA_ASSERT_OK(SetVerbosity("logtest=0"));
  EXPECT_THAT(log(1), IsEmpty());
}

TEST_F(LogTest, BadVerbosityNamesTheEntry) {
  EXPECT_THAT(SetVerbosity("logtest2=1,comm=x"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "TESSERA_VERBOSE: expected module=level, got 'comm=x'"));
  EXPECT_THAT(Stderr([] { TESSERA_VLOG(logtest2, 1) << "kept"; }),
              HasSubstr("kept"));
  EXPECT_THAT(SetVerbosity("=1"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'=1'")));
}

TEST_F(LogTest, MacrosNestInUnbracedIf) {
  const auto log = [](bool first) {
    if (first)
      TESSERA_LOG_RANK0(INFO) << "first";
    else
      TESSERA_LOG(INFO) << "second";
  };
  EXPECT_THAT(Stderr([&] { log(true); }), HasSubstr("first"));
  EXPECT_THAT(Stderr([&] { log(false); }), HasSubstr("second"));
}

// Each line is one write: through an O_APPEND file or a pipe lines never mix.
TEST_F(LogTest, LinesOfThreadsDoNotMix) {
  const std::string word(200, 'x');
  const std::string text = Stderr([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) TESSERA_LOG(INFO) << word << "\\n";
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::vector<std::string> lines =
      absl::StrSplit(text, '\n', absl::SkipEmpty());
  EXPECT_THAT(lines, SizeIs(200));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, MatchesRegex(absl::StrCat("I .*] ", word, "\\\\n")));
  }
}

}  // namespace
}  // namespace tessera
