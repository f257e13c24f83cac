#include "data/text/token_writer.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

bool Exists(const std::string& path) { return std::ifstream(path).good(); }

TEST(TokenFileWriter, WritesWhatTokenFileReads) {
  for (const TokenType type :
       {TokenType::kUint8, TokenType::kUint16, TokenType::kUint32}) {
    for (const bool header : {false, true}) {
      if (header && type == TokenType::kUint8) continue;
      const std::string path = TestPath("f");
      TESSERA_ASSERT_OK_AND_ASSIGN(
          auto writer, TokenFileWriter::Create(path, {type, header}));
      TESSERA_ASSERT_OK(writer->Append({1, 255}));
      TESSERA_ASSERT_OK(writer->Append({}));
      TESSERA_ASSERT_OK(writer->Append({3}));
      EXPECT_EQ(writer->num_tokens(), 3);
      TESSERA_ASSERT_OK(writer->Finish());
      TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file,
                                   header ? TokenFile::Open(path, {})
                                          : TokenFile::Open(path, {type, 0}));
      EXPECT_EQ(file.type(), type);
      std::vector<int64_t> tokens(3);
      ASSERT_EQ(file.num_tokens(), 3);
      TESSERA_ASSERT_OK(file.CopyTokens(0, absl::MakeSpan(tokens)));
      EXPECT_THAT(tokens, ElementsAre(1, 255, 3));
      EXPECT_FALSE(Exists(path + ".part"));
    }
  }
}

// More than the buffer holds.
TEST(TokenFileWriter, LargeFiles) {
  const std::string path = TestPath("f");
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, TokenFileWriter::Create(path, {}));
  std::vector<int32_t> tokens(700001);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i % 65536);
  }
  TESSERA_ASSERT_OK(writer->Append(tokens));
  TESSERA_ASSERT_OK(writer->Append(tokens));
  TESSERA_ASSERT_OK(writer->Finish());
  TESSERA_ASSERT_OK_AND_ASSIGN(const TokenFile file, TokenFile::Open(path, {}));
  ASSERT_EQ(file.num_tokens(), 1400002);
  std::vector<int64_t> read(1400002);
  TESSERA_ASSERT_OK(file.CopyTokens(0, absl::MakeSpan(read)));
  for (size_t i = 0; i < read.size(); ++i) {
    ASSERT_EQ(read[i], static_cast<int64_t>(i % 700001 % 65536));
  }
}

TEST(TokenFileWriter, WhatCannotBeIsRefused) {
  const std::string path = TestPath("f");
  EXPECT_THAT(TokenFileWriter::Create(path, {TokenType::kUint8, true}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("uint8")));
  EXPECT_THAT(TokenFileWriter::Create("/nowhere/f", {}),
              StatusIs(StatusCode::kNotFound, HasSubstr("/nowhere/f.part")));
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(auto writer,
                                 TokenFileWriter::Create(path, {}));
    TESSERA_ASSERT_OK(writer->Append({5, 6}));
    EXPECT_THAT(writer->Append({1, 65536}),
                StatusIs(StatusCode::kInvalidArgument,
                         path + ": token 3 would be 65536, which does not fit "
                                "uint16"));
    EXPECT_THAT(writer->Append({-1}),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("token 2")));
    EXPECT_TRUE(Exists(path + ".part"));
  }
  EXPECT_FALSE(Exists(path + ".part"));  // not finished
  EXPECT_FALSE(Exists(path));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, TokenFileWriter::Create(path, {}));
  EXPECT_THAT(writer->Finish(), StatusIs(StatusCode::kInvalidArgument,
                                         HasSubstr("no tokens to write")));
}

}  // namespace
}  // namespace tessera
