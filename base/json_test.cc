#include "base/json.h"

#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(QuoteJsonTest, EscapesQuotesBackslashesAndControlCharacters) {
  EXPECT_EQ(QuoteJson(""), R"("")");
  EXPECT_EQ(QuoteJson("a\"b\\c\nd"), R"("a\"b\\c\u000ad")");
  EXPECT_EQ(QuoteJson(absl::string_view("\0\x1F \x7F", 4)),
            R"("\u0000\u001f \u007f")");
}

TEST(QuoteJsonTest, LeavesUtf8AsItIs) {
  EXPECT_EQ(QuoteJson("d\xC3\xA9j\xC3\xA0 ~"), "\"d\xC3\xA9j\xC3\xA0 ~\"");
}

TEST(QuoteJsonTest, OfBytesIsAscii) {
  EXPECT_EQ(QuoteJsonBytes("a\"b\\c\n~\x7F\x80\xFF"),
            R"("a\"b\\c\u000a~\u007f\u0080\u00ff")");
}

}  // namespace
}  // namespace tessera
