#include "data/text/tokenizer.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;

TEST(ByteTokenizer, IdsAreBytes) {
  const ByteTokenizer tokenizer;
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_EQ(tokenizer.eos_id(), Tokenizer::kNone);
  std::vector<int32_t> ids = {7};
  TESSERA_ASSERT_OK(tokenizer.Encode(absl::string_view("a\0\xFF", 3), &ids));
  EXPECT_THAT(ids, ElementsAre(7, 'a', 0, 255));
  EXPECT_THAT(tokenizer.Decode(ids), IsOkAndHolds(std::string("\x07"
                                                              "a\0\xFF",
                                                              4)));
  EXPECT_THAT(tokenizer.Decode({1, 256}),
              StatusIs(StatusCode::kInvalidArgument,
                       "token 1 is 256, the vocabulary has 256"));
}

TEST(ByteTokenizer, MayHaveAnEndOfText) {
  const ByteTokenizer tokenizer(true);
  EXPECT_EQ(tokenizer.vocab_size(), 257);
  EXPECT_EQ(tokenizer.eos_id(), 256);
  EXPECT_THAT(tokenizer.Decode({'a', 256, 'b'}), IsOkAndHolds("ab"));
  EXPECT_THAT(tokenizer.Decode({-1}), StatusIs(StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace tessera
