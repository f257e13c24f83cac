#include "monitor/progress_bar.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ProgressBarTest : public ::testing::Test {
 protected:
  ProgressBarOptions Options(int64_t line_each = 0) {
    ProgressBarOptions options;
    options.line_each = line_each;
    options.clock = [this] { return now_; };
    return options;
  }
  std::vector<int64_t> Due(int64_t total, int64_t line_each = 0) {
    const ProgressBar bar(nullptr, total, Options(line_each));
    std::vector<int64_t> due;
    for (int64_t step = 1; step <= 25; ++step) {
      if (bar.IsDue(step)) due.push_back(step);
    }
    return due;
  }
  // Returns what is written to a file while `f` runs.
  template <typename F>
  static std::string Written(const F& f) {
    std::FILE* const file = std::tmpfile();
    f(file);
    std::rewind(file);
    char text[2000] = {};
    (void)std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    return text;
  }
  absl::Duration now_ = absl::Seconds(100);
};

TEST_F(ProgressBarTest, IsDueAtTheEndsAndInBetween) {
  EXPECT_THAT(Due(25), ElementsAre(1, 3, 6, 9, 12, 15, 18, 21, 24, 25));
  EXPECT_THAT(Due(25, 12), ElementsAre(1, 12, 24, 25));
  EXPECT_THAT(Due(0), ElementsAre(1, 10, 20));
}

TEST_F(ProgressBarTest, OffATerminalALineNowAndThen) {
  const std::string text = Written([&](std::FILE* file) {
    ProgressBar bar(file, 20, Options());
    for (int64_t step = 1; step <= 5; ++step) {
      now_ += absl::Seconds(step == 1 ? 10 : 2);  // the first one warms up
      bar.Show(step, absl::StrCat("loss ", step));
    }
    bar.Say("done");
  });
  EXPECT_EQ(text,
            " 1/20  00:10  loss 1\n"
            " 2/20  00:12<00:36  loss 2\n"
            " 4/20  00:16<00:32  loss 4\n"
            "done\n");
}

TEST_F(ProgressBarTest, ARunThatGoesOnIsSeenAtOnce) {
  const std::string text = Written([&](std::FILE* file) {
    ProgressBar bar(file, 20, Options());
    for (int64_t step = 13; step <= 16; ++step) bar.Show(step, "");
  });
  EXPECT_EQ(text,
            "13/20  00:00\n"
            "14/20  00:00<00:00\n"
            "16/20  00:00<00:00\n");
}

TEST_F(ProgressBarTest, TheBarHasWhatRoomTheWordsLeave) {
  const ProgressBar bar(nullptr, 20, Options());
  EXPECT_EQ(bar.Line(5, "loss 2", 60),
            "[######..................]   5/20  00:00  loss 2");
  EXPECT_EQ(bar.Line(20, "loss 2", 60),
            "[########################]  20/20  00:00  loss 2");
  EXPECT_EQ(bar.Line(10, "loss 2", 30), "[###...]  10/20  00:00  loss 2");
  EXPECT_EQ(bar.Line(10, "loss 2", 12), "10/20  00:00");
  EXPECT_THAT(bar.Line(10, "", 12), Not(HasSubstr("  \n")));
}

TEST_F(ProgressBarTest, OfUnknownLengthItCounts) {
  const std::string text = Written([&](std::FILE* file) {
    ProgressBar bar(file, 0, Options(2));
    for (int64_t step = 1; step <= 2; ++step) bar.Show(step, "");
  });
  EXPECT_EQ(text, "step 1  00:00\nstep 2  00:00\n");
}

TEST_F(ProgressBarTest, WithoutAFileNothing) {
  ProgressBar bar(nullptr, 3, Options());
  bar.Show(1, "x");
  bar.Say("y");
}

TEST(ClockTextTest, HoursAndDaysWhereThereAreSome) {
  EXPECT_EQ(ClockText(absl::Milliseconds(499)), "00:00");
  EXPECT_EQ(ClockText(absl::Milliseconds(61500)), "01:02");
  EXPECT_EQ(ClockText(absl::Seconds(3600 + 65)), "1:01:05");
  EXPECT_EQ(ClockText(absl::Seconds(86400 * 3 + 65)), "3d 00:01:05");
}

}  // namespace
}  // namespace tessera
