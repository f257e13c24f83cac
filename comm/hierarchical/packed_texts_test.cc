#include "comm/hierarchical/packed_texts.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(PackedTextsTest, UnpacksWhatWasPacked) {
  const std::vector<std::string> texts = {"", "abc", std::string(300, '\0')};
  EXPECT_THAT(UnpackTexts(PackTexts(texts), 3), IsOkAndHolds(texts));
}

// A rank's own word is no measure of what has come from it.
TEST(PackedTextsTest, LengthsAreNotBelieved) {
  const std::string packed = PackTexts({"a", "bc"});
  for (size_t n = 0; n < packed.size(); ++n) {
    EXPECT_THAT(UnpackTexts(absl::string_view(packed).substr(0, n), 2),
                StatusIs(absl::StatusCode::kInternal))
        << n;
  }
  for (size_t count : {1, 3}) {
    EXPECT_THAT(UnpackTexts(packed, count),
                StatusIs(absl::StatusCode::kInternal));
  }
}

}  // namespace
}  // namespace tessera
