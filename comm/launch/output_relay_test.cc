#include "comm/launch/output_relay.h"

#include <pthread.h>

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(LinePrefixerTest, WholeLinesOnly) {
  LinePrefixer lines("[3] ");
  EXPECT_EQ(lines.Add("a\nb"), "[3] a\n");
  EXPECT_EQ(lines.Add("c"), "");
  EXPECT_EQ(lines.Add("d\n\ne\n"), "[3] bcd\n[3] \n[3] e\n");
  EXPECT_EQ(lines.Flush(), "");
}

TEST(LinePrefixerTest, TheLastLineMayLackItsEnd) {
  LinePrefixer lines("[0] ");
  EXPECT_EQ(lines.Add("x\ny"), "[0] x\n");
  EXPECT_EQ(lines.Flush(), "[0] y\n");
  EXPECT_EQ(lines.Flush(), "");
}

TEST(LinePrefixerTest, ProgressBarsSurvive) {
  LinePrefixer behind("[0] ");  // \r at the end of a drawing
  EXPECT_EQ(behind.Add("10%\r20"), "[0] 10%\r");
  EXPECT_EQ(behind.Add("%\r"), "[0] 20%\r");
  EXPECT_EQ(behind.Add("done\n"), "[0] done\n");
  LinePrefixer before("[0] ");  // \r at its begin
  EXPECT_EQ(before.Add("\r10%"), "\r");
  EXPECT_EQ(before.Add("\r20%"), "[0] 10%\r");
  EXPECT_EQ(before.Add("\n"), "[0] 20%\n");
}

TEST(LinePrefixerTest, ReturnAndNewlineAreOneEnd) {
  LinePrefixer lines("[0] ");
  EXPECT_EQ(lines.Add("a\r\nb\r"), "[0] a\r\n[0] b\r");
  EXPECT_EQ(lines.Add("\nc\n\n"), "\n[0] c\n[0] \n");
}

TEST(LinePrefixerTest, EndlessLinesComeInPieces) {
  LinePrefixer lines("[0] ");
  const std::string piece(1 << 16, 'x');
  EXPECT_EQ(lines.Add(piece + "y\n"), "[0] " + piece + "\n[0] y\n");
}

// A stack that no address space holds stands for a system without threads.
TEST(OutputRelayTest, ASystemWithoutThreadsIsAnError) {
  pthread_attr_t before, huge;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_attr_init(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 60), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  const auto relay = OutputRelay::Start({});
  EXPECT_EQ(pthread_setattr_default_np(&before), 0);
  EXPECT_THAT(relay,
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("cannot start a thread (tessera-relay): ")));
  pthread_attr_destroy(&huge);
  pthread_attr_destroy(&before);
}

}  // namespace
}  // namespace tessera
