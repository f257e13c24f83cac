#include "loader/client_state.h"

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

TEST(ClientStateTest, AnyBytesComeBack) {
  const ClientParts parts = {{"empty", ""},
                             {"the loader", "a place"},
                             {"program", std::string("\0\n 3\n\xff", 7)}};
  EXPECT_THAT(UnpackClientState(PackClientState(parts)), IsOkAndHolds(parts));
  EXPECT_THAT(UnpackClientState(PackClientState({})),
              IsOkAndHolds(ClientParts()));
}

TEST(ClientStateTest, IsReadable) {
  EXPECT_EQ(PackClientState({{"loader", "abc"}, {"b", ""}}),
            "tessera-parts 2\nb 0\n\nloader 3\nabc\n");
}

// Each cut, and each byte that is another, of a head or a size.
TEST(ClientStateTest, WhatIsCutIsRefused) {
  const std::string packed = PackClientState({{"loader", "abc"}, {"b", "x"}});
  for (size_t size = 0; size < packed.size(); ++size) {
    EXPECT_THAT(UnpackClientState(packed.substr(0, size)),
                StatusIs(StatusCode::kDataLoss, HasSubstr("at byte")))
        << size;
  }
  EXPECT_THAT(UnpackClientState(packed + "x"),
              StatusIs(StatusCode::kDataLoss, HasSubstr("the end at byte")));
  EXPECT_THAT(
      UnpackClientState("tessera-parts 1\nb 18446744073709551615\nx\n"),
      StatusIs(StatusCode::kDataLoss, HasSubstr("18446744073709551615 bytes")));
  EXPECT_THAT(
      UnpackClientState("3 5 2000 7"),
      StatusIs(StatusCode::kDataLoss, HasSubstr("made by PackClientState")));
}

TEST(ClientStateTest, OnePart) {
  const std::string packed = PackClientState({{"loader", "abc"}, {"b", "x"}});
  EXPECT_THAT(ClientPart(packed, "loader"), IsOkAndHolds("abc"));
  EXPECT_THAT(ClientPart(packed, "program"),
              StatusIs(StatusCode::kNotFound,
                       HasSubstr("no part 'program'; there are: b, loader")));
}

}  // namespace
}  // namespace tessera
