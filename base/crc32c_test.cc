#include "base/crc32c.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// The values are RFC 3720's (B.4) and the polynomial's usual check value.
TEST(Crc32cTest, KnownValues) {
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(Crc32cTest, GoesOnWhereItStopped) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes.push_back(static_cast<char>(i * 7));
  for (size_t cut : {0, 1, 7, 64, 513, 1000}) {
    const absl::string_view all = bytes;
    EXPECT_EQ(ExtendCrc32c(Crc32c(all.substr(0, cut)), all.substr(cut)),
              Crc32c(all));
  }
}

}  // namespace
}  // namespace tessera
