#include "tools/tokenize_command.h"

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/command/command_line.h"
#include "base/status_matchers.h"
#include "data/sentencepiece/train_model_test_util.h"
#include "data/test_files.h"
#include "data/text/token_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/separate_commands.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Tokenize : public ::testing::Test {
 protected:
  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    args.insert(args.begin(), "tokenize");
    return CommandLine("tessera", {TokenizeCommand(RunTokenize)})
        .Run(args, &out_, &err_);
  }

  std::vector<int64_t> Tokens(const TokenFileOptions& options = {}) const {
    absl::StatusOr<TokenFile> file = TokenFile::Open(path_, options);
    TESSERA_EXPECT_OK(file);
    if (!file.ok()) return {};
    std::vector<int64_t> tokens(static_cast<size_t>(file->num_tokens()));
    TESSERA_EXPECT_OK(file->CopyTokens(0, absl::MakeSpan(tokens)));
    return tokens;
  }

  const std::string path_ = TestPath("out.bin");
  std::ostringstream out_, err_;
};

TEST_F(Tokenize, FilesAreDocuments) {
  const std::string a = WriteTestFile("a", "hi\n"), b = WriteTestFile("b", "y");
  ASSERT_EQ(Run({"--out", path_, a, b}), 0) << err_.str();
  EXPECT_EQ(out_.str(),
            path_ +
                ": 6 tokens of 2 documents, uint16, vocabulary 257, end of "
                "text 256\n");
  EXPECT_THAT(Tokens(), ElementsAre('h', 'i', '\n', 256, 'y', 256));
  ASSERT_EQ(Run({"--out", path_, "--begin", "--type", "uint32", a, b}), 0);
  EXPECT_THAT(Tokens(), ElementsAre(256, 'h', 'i', '\n', 256, 'y'));
  ASSERT_EQ(Run({"--out", path_, "--no_end", "--tokenizer", "bytes",
                 "--headerless", TestPath("{a,b}")}),
            0);
  EXPECT_THAT(out_.str(),
              HasSubstr("uint8 without a header, vocabulary 256\n"));
  EXPECT_EQ(ReadBytes(path_), "hi\ny");
  ASSERT_EQ(Run({"--decode", path_, "--tokenizer", "bytes", "--type", "uint8",
                 "--tokens", "2"}),
            0);
  EXPECT_EQ(out_.str(), "hi\n");
}

TEST_F(Tokenize, LinesMayBeDocuments) {
  const std::string a = WriteTestFile("a", "one\n\ntwo\nthree");
  ASSERT_EQ(Run({"--out", path_, "--lines", a}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("14 tokens of 3 documents"));
  ASSERT_EQ(Run({"--decode", path_}), 0);
  EXPECT_EQ(out_.str(), "onetwothree\n");
  ASSERT_EQ(Run({"--out", path_, "--quiet", a}), 0);
  EXPECT_EQ(out_.str() + err_.str(), "");
}

TEST_F(Tokenize, ByAModelOfSentencePiece) {
  const std::string text =
      WriteTestFile("text", "the cat sat on the mat\nthe mat sat on the cat\n");
  ASSERT_EQ(TrainSentencePiece(text, TestPath("m"), "bpe", 20), "");
  const std::string model = TestPath("m") + ".model";
  ASSERT_EQ(Run({"--out", path_, "--tokenizer", model, "--lines", text}), 0)
      << err_.str();
  EXPECT_THAT(out_.str(),
              HasSubstr("of 2 documents, uint16, vocabulary 20, end "
                        "of text 2"));
  EXPECT_EQ(Tokens().back(), 2);
  ASSERT_EQ(Run({"--decode", path_, "--tokenizer", model}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("the cat sat on the mat"));
}

TEST_F(Tokenize, HelpIsNoError) {
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("usage: tessera tokenize [TEXT...]"));
  EXPECT_EQ(err_.str(), "");
}

TEST_F(Tokenize, WrongCommandsAreTold) {
  const std::string a = WriteTestFile("a", "x");
  EXPECT_EQ(Run({}), 2);
  EXPECT_THAT(err_.str(),
              HasSubstr("expected either --out or --decode\n(`tessera"));
  EXPECT_EQ(Run({"--out", path_}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("expected text files"));
  EXPECT_EQ(Run({"--out"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--out needs a value"));
  EXPECT_EQ(Run({"--what", a}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("unknown flag --what"));
  EXPECT_EQ(Run({"--out", path_, "--tokenizer", "bytes", a}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("bytes: has no end-of-text token; say"));
  EXPECT_EQ(Run({"--out", path_, "--type", "int", a}), 1);
  EXPECT_THAT(err_.str(),
              HasSubstr("expected uint8, uint16 or uint32, got int"));
  EXPECT_EQ(Run({"--out", path_, "--headerless", "--type", "uint8", a}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("a: " + path_ + ": token 1 would be 256"));
  EXPECT_EQ(Run({"--out", path_, "/nowhere"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("/nowhere: No such file"));
  EXPECT_EQ(Run({"--out", path_, "--tokenizer", a, a}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("is no SentencePiece model"));
  EXPECT_FALSE(std::ifstream(path_).good());
}

}  // namespace
}  // namespace tessera
