// Reads every file of config/testdata. A file's first line says the world size
// and the message (after the file's name), or OK:
//   // world 4: OK
//   # world 2: :3:5: train_batch_size: expected at least 1, got 0
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tessera {
namespace {

constexpr char kFolder[] = "config/testdata";

std::vector<std::string> Files() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    files.push_back(entry.path().filename().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string PathOf(const std::string& name) {
  return absl::StrCat(kFolder, "/", name);
}

struct Expectation {
  int world_size = 0;
  std::string outcome;  // "OK", or the message without the file's name
};

Expectation ReadExpectation(absl::string_view text) {
  constexpr absl::string_view kMark = "world ";
  const absl::string_view line = text.substr(0, text.find('\n'));
  const size_t mark = line.find(kMark);
  const std::vector<std::string> parts = absl::StrSplit(
      line.substr(mark + kMark.size()), absl::MaxSplits(": ", 1));
  Expectation expectation;
  EXPECT_TRUE(mark != line.npos && parts.size() == 2 &&
              absl::SimpleAtoi(parts[0], &expectation.world_size))
      << "first line: " << line;
  if (parts.size() == 2) expectation.outcome = parts[1];
  return expectation;
}

class ConfigCorpus : public ::testing::TestWithParam<std::string> {};

TEST_P(ConfigCorpus, FirstLineHolds) {
  const std::string path = PathOf(GetParam());
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string text, ReadWholeFile(path));
  const Expectation expected = ReadExpectation(text);
  const absl::StatusOr<proto::Config> config =
      LoadConfig(path, expected.world_size);
  if (expected.outcome == "OK") {
    TESSERA_EXPECT_OK(config);
  } else {
    EXPECT_THAT(config, StatusIs(absl::StatusCode::kInvalidArgument,
                                 absl::StrCat(path, expected.outcome)));
  }
}

// The fuzzer's checks on each file, on each of its prefixes, and with each byte
// replaced by some that matter to the grammar.
TEST_P(ConfigCorpus, SurvivesMutations) {
  TESSERA_ASSERT_OK_AND_ASSIGN(std::string text,
                               ReadWholeFile(PathOf(GetParam())));
  const auto run = [](absl::string_view input) {
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                           input.size());
  };
  for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
    run(absl::string_view(text).substr(0, bytes));
  }
  // Each of these at every third place.
  constexpr char kOthers[] = {'\0', '"', '\\', '{', ']', ',', '9', '-', '\xFF'};
  size_t place = 0;
  for (char& byte : text) {
    const char kept = byte;
    for (size_t i = place++ % 3; i < sizeof(kOthers); i += 3) {
      byte = kOthers[i];
      run(text);
    }
    byte = kept;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConfigCorpus, ::testing::ValuesIn(Files()),
                         [](const ::testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });

}  // namespace
}  // namespace tessera
