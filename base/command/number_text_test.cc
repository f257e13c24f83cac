#include "base/command/number_text.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(NumberTextTest, GroupsDigitsByThree) {
  EXPECT_EQ(Grouped(0), "0");
  EXPECT_EQ(Grouped(999), "999");
  EXPECT_EQ(Grouped(-999), "-999");
  EXPECT_EQ(Grouped(1000), "1,000");
  EXPECT_EQ(Grouped(-123456), "-123,456");
  EXPECT_EQ(Grouped(10893312), "10,893,312");
  EXPECT_EQ(Grouped(std::numeric_limits<int64_t>::min()),
            "-9,223,372,036,854,775,808");
}

TEST(NumberTextTest, TimesHaveTheUnitsOfPeople) {
  EXPECT_EQ(TimeText(0), "0 us");
  EXPECT_EQ(TimeText(42e-6), "42 us");
  EXPECT_EQ(TimeText(0.0123), "12.3 ms");
  EXPECT_EQ(TimeText(1.5), "1.5 s");
  EXPECT_EQ(TimeText(856), "14 min 16 s");
  EXPECT_EQ(TimeText(12000), "3 h 20 min");
  EXPECT_EQ(TimeText(1000 * 86400.0), "1,000 days 0 h");
}

}  // namespace
}  // namespace tessera
