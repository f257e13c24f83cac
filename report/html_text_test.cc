#include "report/html_text.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(HtmlTextTest, TextIsEscapedAndXml) {
  EXPECT_EQ(EscapeHtml("<a href='x'>&\""),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;");
  EXPECT_EQ(EscapeHtml(std::string("a\0b\x1b", 4)),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD");
  EXPECT_EQ(EscapeHtml("\xC3\xA4\xFF"), "\xC3\xA4\xEF\xBF\xBD");
}

// A file's name is no scheme, query or markup.
TEST(HtmlTextTest, LinksArePaths) {
  EXPECT_EQ(LinkTo("memory0.html"), "./memory0.html");
  EXPECT_EQ(LinkTo("../a run/m.html"), "./../a%20run/m.html");
  EXPECT_EQ(LinkTo("javascript:a?b#c%\""), "./javascript%3Aa%3Fb%23c%25%22");
}

}  // namespace
}  // namespace tessera
