#include "data/byte_corpus.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string WriteFile(const std::string& content) {
  const std::string path = absl::StrCat(
      ::testing::TempDir(),
      ::testing::UnitTest::GetInstance()->current_test_info()->name());
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

TEST(ByteCorpus, HoldsTheBytes) {
  const std::string content("a\0\xFFz", 4);
  const std::string path = WriteFile(content);
  TESSERA_ASSERT_OK_AND_ASSIGN(const ByteCorpus corpus, ByteCorpus::Open(path));
  EXPECT_EQ(corpus.path(), path);
  EXPECT_THAT(corpus.bytes(), ElementsAre('a', 0, 0xFF, 'z'));
}

TEST(ByteCorpus, SamplesShareTheirBorderByte) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const ByteCorpus corpus,
                               ByteCorpus::Open(WriteFile("012345678")));
  EXPECT_EQ(corpus.num_samples(4), 2);
  EXPECT_THAT(corpus.sample(0, 4), ElementsAre('0', '1', '2', '3', '4'));
  EXPECT_THAT(corpus.sample(1, 4), ElementsAre('4', '5', '6', '7', '8'));
  EXPECT_EQ(corpus.num_samples(3), 2);  // the rest is not used
  EXPECT_THAT(corpus.sample(1, 3), ElementsAre('3', '4', '5', '6'));
}

TEST(ByteCorpus, NumSamplesAtTheBorders) {
  const std::string path = WriteFile("0123456789");
  TESSERA_ASSERT_OK_AND_ASSIGN(const ByteCorpus corpus, ByteCorpus::Open(path));
  const std::pair<int64_t, int64_t> cases[] = {
      {1, 9}, {2, 4}, {4, 2}, {5, 1}, {8, 1}, {9, 1}, {10, 0}, {1000, 0}};
  for (const auto& [seq_len, samples] : cases) {
    EXPECT_EQ(corpus.num_samples(seq_len), samples) << seq_len;
    if (samples > 0) {
      EXPECT_THAT(corpus.sample(samples - 1, seq_len), SizeIs(seq_len + 1));
    }
  }
}

TEST(ByteCorpusDeath, SampleOutOfRange) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const ByteCorpus corpus,
                               ByteCorpus::Open(WriteFile("012345678")));
  EXPECT_DEATH(corpus.sample(2, 4), "2 vs 2");
  EXPECT_DEATH(corpus.sample(-1, 4), "-1 vs 0");
  EXPECT_DEATH(corpus.num_samples(0), "seq_len > 0");
}

TEST(ByteCorpus, MissingFileIsNotFound) {
  EXPECT_THAT(ByteCorpus::Open("/nowhere/text"),
              StatusIs(StatusCode::kNotFound,
                       "/nowhere/text: No such file or directory"));
}

TEST(ByteCorpus, EmptyAndShortFilesAreRefused) {
  const std::string empty = WriteFile("");
  EXPECT_THAT(ByteCorpus::Open(empty),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(empty,
                                    ": expected at least 1 bytes, the "
                                    "file has 0")));
  EXPECT_THAT(ByteCorpus::Open(empty, 0),
              StatusIs(StatusCode::kInvalidArgument));
  const std::string path = WriteFile("12345");
  TESSERA_EXPECT_OK(ByteCorpus::Open(path, 5));
  EXPECT_THAT(ByteCorpus::Open(path, 6),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(path,
                                    ": expected at least 6 bytes, the "
                                    "file has 5")));
}

TEST(ByteCorpus, FoldersAndPipesAreRefused) {
  EXPECT_THAT(
      ByteCorpus::Open(::testing::TempDir()),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  // Opening a pipe without a writer must not wait for one either.
  const std::string pipe = absl::StrCat(::testing::TempDir(), "pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(
      ByteCorpus::Open(pipe),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  unlink(pipe.c_str());
}

TEST(ByteCorpus, MovesKeepTheMapping) {
  TESSERA_ASSERT_OK_AND_ASSIGN(ByteCorpus a, ByteCorpus::Open(WriteFile("ab")));
  const uint8_t* data = a.bytes().data();
  ByteCorpus b = std::move(a);
  EXPECT_EQ(b.bytes().data(), data);
  EXPECT_THAT(a.bytes(), IsEmpty());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(a.num_samples(1), 0);
  TESSERA_ASSERT_OK_AND_ASSIGN(ByteCorpus c,
                               ByteCorpus::Open(WriteFile("xyz")));
  c = std::move(b);
  EXPECT_THAT(c.bytes(), SizeIs(2));
  ByteCorpus& same = c;
  c = std::move(same);
  EXPECT_EQ(c.bytes().data(), data);
}

TEST(ByteCorpusDeathTest, ATruncatedFileIsNamed) {
  const std::string path = WriteFile(std::string(3 * 4096, 'x'));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ByteCorpus corpus, ByteCorpus::Open(path));
  ASSERT_EQ(truncate(path.c_str(), 100), 0);
  EXPECT_EQ(corpus.bytes()[99], 'x');
  EXPECT_EXIT(
      {
        volatile uint8_t byte = corpus.bytes()[2 * 4096];
        (void)byte;
      },
      testing::KilledBySignal(SIGBUS),
      path + ": the file was truncated while this process read it");
}

}  // namespace
}  // namespace tessera
