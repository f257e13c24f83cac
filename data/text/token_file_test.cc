#include "data/text/token_file.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr TokenFileOptions kUint16 = {TokenType::kUint16, 0};
constexpr TokenFileOptions kUint32 = {TokenType::kUint32, 0};

// A file in llm.c's format, written without the code that is tested.
std::string WithHeader(int32_t magic, int32_t version, int32_t count,
                       const std::string& tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return BytesOf(header) + tokens;
}

std::vector<int64_t> AllTokens(const TokenFile& file) {
  std::vector<int64_t> tokens(static_cast<size_t>(file.num_tokens()));
  TESSERA_EXPECT_OK(file.CopyTokens(0, absl::MakeSpan(tokens)));
  return tokens;
}

TEST(TokenFile, HeaderlessFilesAreWhatTheCallerSays) {
  const std::string path =
      WriteTestFile("f", BytesOf<uint16_t>({1, 50256, 65535, 0}));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile narrow,
                               TokenFile::Open(path, kUint16));
  EXPECT_THAT(AllTokens(narrow), ElementsAre(1, 50256, 65535, 0));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile wide,
                               TokenFile::Open(path, kUint32));
  EXPECT_THAT(AllTokens(wide), ElementsAre(1 + (int64_t{50256} << 16), 65535));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile bytes,
                               TokenFile::Open(path, {TokenType::kUint8, 0}));
  EXPECT_THAT(AllTokens(bytes), ElementsAre(1, 0, 0x50, 0xC4, 255, 255, 0, 0));
}

TEST(TokenFile, ReadsBothFormatsOfLlmC) {
  const std::string gpt2 = WriteTestFile(
      "gpt2", WithHeader(20240520, 1, 3, BytesOf<uint16_t>({50256, 7, 65535})));
  // A type that is given does not matter where a header says one.
  for (const TokenFileOptions& options : {TokenFileOptions(), kUint32}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file,
                                 TokenFile::Open(gpt2, options));
    EXPECT_EQ(file.type(), TokenType::kUint16);
    EXPECT_THAT(AllTokens(file), ElementsAre(50256, 7, 65535));
  }
  const std::string llama3 = WriteTestFile(
      "llama3",
      WithHeader(20240801, 7, 2, BytesOf<uint32_t>({128000, 4294967295u})));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file,
                               TokenFile::Open(llama3, {}));
  EXPECT_EQ(file.type(), TokenType::kUint32);
  EXPECT_THAT(AllTokens(file), ElementsAre(128000, 4294967295));
}

TEST(TokenFile, WritesTheHeaderThatItReads) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string gpt2,
                               TokenHeader(TokenType::kUint16, 5));
  EXPECT_EQ(gpt2, WithHeader(20240520, 1, 5, ""));
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string llama3,
                               TokenHeader(TokenType::kUint32, 2147483647));
  EXPECT_EQ(llama3, WithHeader(20240801, 7, 2147483647, ""));
  EXPECT_THAT(TokenHeader(TokenType::kUint32, 2147483648),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("2147483648")));
  EXPECT_THAT(TokenHeader(TokenType::kUint8, 1),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("uint8")));
}

TEST(TokenFile, CopiesFromAnywhere) {
  std::vector<uint16_t> tokens(5000);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<uint16_t>(i);
  }
  const std::string path = WriteTestFile("f", BytesOf(tokens));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file,
                               TokenFile::Open(path, kUint16));
  for (const int64_t begin : {0, 1, 2499, 4999, 5000}) {
    std::vector<int64_t> out(static_cast<size_t>(5000 - begin));
    TESSERA_ASSERT_OK(file.CopyTokens(begin, absl::MakeSpan(out)));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], begin + static_cast<int64_t>(i));
    }
  }
  std::vector<int64_t> out(2);
  EXPECT_DEATH((void)file.CopyTokens(4999, absl::MakeSpan(out)), "2 vs 1");
  EXPECT_DEATH((void)file.CopyTokens(-1, absl::MakeSpan(out)), "-1 vs 0");
}

TEST(TokenFile, TokensOutsideTheVocabularyAreNamed) {
  const std::string path = WriteTestFile(
      "f", WithHeader(20240520, 1, 4, BytesOf<uint16_t>({9, 10, 11, 12})));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file,
                               TokenFile::Open(path, {std::nullopt, 11}));
  std::vector<int64_t> out(2);
  TESSERA_EXPECT_OK(file.CopyTokens(0, absl::MakeSpan(out)));
  EXPECT_THAT(file.CopyTokens(1, absl::MakeSpan(out)),
              StatusIs(StatusCode::kInvalidArgument,
                       StartsWith(absl::StrCat(
                           path,
                           ": token 2 (byte 1028) is 11, the vocabulary "
                           "has 11;"))));
}

TEST(TokenFile, TokensThatNoInt32HoldsAreNamed) {
  const std::string path = WriteTestFile(
      "f", WithHeader(20240801, 7, 3,
                      BytesOf<uint32_t>({2147483647, 2147483648, 1})));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file, TokenFile::Open(path, {}));
  std::vector<int32_t> out(1);
  TESSERA_EXPECT_OK(file.CopyTokens(0, absl::MakeSpan(out)));
  EXPECT_THAT(out, ElementsAre(2147483647));
  EXPECT_THAT(file.CopyTokens(1, absl::MakeSpan(out)),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(path,
                                    ": token 1 (byte 1028) is 2147483648, "
                                    "which no int32 holds; read int64 of it")));
}

struct BadFile {
  const char* name;
  std::string content;
  StatusCode code;
  const char* message;  // behind "path: "
};

TEST(TokenFile, BadFilesAreRefusedByFileAndByte) {
  const std::string four = BytesOf<uint16_t>({1, 2, 3, 4});
  const BadFile cases[] = {
      {"empty", "", StatusCode::kInvalidArgument,
       "expected at least 1 bytes, the file has 0"},
      {"no_header", four, StatusCode::kInvalidArgument,
       "byte 0: expected llm.c's header (20240520 or 20240801), got 131073; "},
      {"short_header", WithHeader(20240520, 1, 4, "").substr(0, 1000),
       StatusCode::kDataLoss,
       "byte 1000: the file ends in llm.c's header of 1024 bytes"},
      {"version", WithHeader(20240520, 2, 4, four),
       StatusCode::kInvalidArgument,
       "byte 4: expected version 1 of llm.c's format 20240520, got 2"},
      {"version7", WithHeader(20240801, 1, 2, four),
       StatusCode::kInvalidArgument, "byte 4: expected version 7"},
      {"count", WithHeader(20240520, 1, 5, four), StatusCode::kDataLoss,
       "byte 8: the header says 5 tokens of uint16, which needs a file of 1034 "
       "bytes; it has 1032; is it truncated?"},
      {"more", WithHeader(20240520, 1, 3, four), StatusCode::kDataLoss,
       "byte 8: the header says 3 tokens"},
      {"negative", WithHeader(20240520, 1, -512, ""), StatusCode::kDataLoss,
       "byte 8: the header says -512 tokens"},
      {"none", WithHeader(20240520, 1, 0, ""), StatusCode::kDataLoss,
       "byte 8: the header says 0 tokens"},
      {"questions", WithHeader(20240522, 1, 4, four),
       StatusCode::kInvalidArgument, "byte 0: this is a file of llm.c's quest"},
  };
  for (const BadFile& bad : cases) {
    const std::string path = WriteTestFile(bad.name, bad.content);
    EXPECT_THAT(
        TokenFile::Open(path, {}),
        StatusIs(bad.code, StartsWith(absl::StrCat(path, ": ", bad.message))));
  }
  const std::string odd = WriteTestFile("odd", "abcde");
  EXPECT_THAT(TokenFile::Open(odd, kUint32),
              StatusIs(StatusCode::kDataLoss,
                       StartsWith(absl::StrCat(
                           odd,
                           ": byte 4: the file ends within a token of "
                           "uint32, it has 5 bytes"))));
  EXPECT_THAT(TokenFile::Open("/nowhere", {}), StatusIs(StatusCode::kNotFound));
}

// A file that lost its end, or one bit of the header that counts, is refused;
// the rest of the header is not used.
TEST(TokenFile, TruncatedFilesAndFlippedHeadersAreRefused) {
  const std::string whole =
      WithHeader(20240801, 7, 3, BytesOf<uint32_t>({1, 2, 3}));
  for (const size_t length : {1, 4, 12, 1023, 1024, 1025, 1035}) {
    EXPECT_FALSE(
        TokenFile::Open(WriteTestFile("t", whole.substr(0, length)), {}).ok())
        << length;
  }
  for (size_t bit = 0; bit < 8 * 16; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    EXPECT_EQ(TokenFile::Open(WriteTestFile("t", flipped), {}).ok(),
              bit >= 8 * 12)
        << bit;
  }
}

}  // namespace
}  // namespace tessera
