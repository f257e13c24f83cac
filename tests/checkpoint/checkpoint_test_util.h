// CheckpointTest saves and loads checkpoints on two ranks, and compares with
// the oracle. The tests that use it define its rank functions.
#ifndef TESTS_CHECKPOINT_CHECKPOINT_TEST_UTIL_H_
#define TESTS_CHECKPOINT_CHECKPOINT_TEST_UTIL_H_

#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {

inline constexpr int kWorldSize = 2;

// The arguments of a rank function: "<spec>\n<folder>".
struct CheckpointArgs {
  explicit CheckpointArgs(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    dir = lines.at(1);
  }
  TrainingSpec spec;
  std::string dir;
};

// While it lives no file of this process may grow beyond `bytes`: a full disk,
// for root too. The engine must handle the SIGXFSZ that such a write raises.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

// The parameter is the stage.
class CheckpointTest : public ::testing::TestWithParam<int> {
 protected:
  CheckpointTest() {
    spec_.model = "Attention";  // dropout: the generator's state matters
    spec_.stage = GetParam();
  }

  std::vector<std::string> RunOn(int world_size, absl::string_view function,
                                 const TrainingSpec& spec,
                                 const std::string& dir) {
    std::vector<std::string> texts;
    for (auto& answer :
         RankPool::Get(world_size)
             ->Run(function, absl::StrCat(spec.ToText(), "\n", dir),
                   absl::Seconds(40))) {
      texts.push_back(answer.ok() ? *answer : answer.status().ToString());
    }
    return texts;
  }
  std::vector<std::string> Run(absl::string_view function, int steps) {
    spec_.steps = steps;
    return RunOn(kWorldSize, function, spec_, dir_);
  }

  // Returns the oracle's record of `steps` steps, from step `first` on.
  static Record Expected(TrainingSpec spec, int steps, int first, int rank) {
    spec.steps = steps;
    Record record;
    for (const std::string& line : TrainWithOracle(spec, kWorldSize)[rank]) {
      bool before = false;
      for (int step = 0; step < first; ++step) {
        before |= absl::StartsWith(line, absl::StrCat("step ", step, ","));
      }
      if (!before) record.push_back(line);
    }
    return record;
  }
  static void ExpectOracle(const std::vector<std::string>& answers,
                           const TrainingSpec& spec, int steps, int first) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      EXPECT_EQ(FirstDifference(Expected(spec, steps, first, rank),
                                RecordFromText(answers[rank])),
                "")
          << "rank " << rank;
    }
  }

  proto::CheckpointManifest Manifest() {
    return CheckpointReader::Open(dir_, FileSystem::Real())->manifest();
  }
  // Returns the name of a rank's data file.
  std::string DataFile(int rank) { return DataFileName(Manifest().id(), rank); }
  // Returns the first tensor of the first storage that the manifest assigns to
  // the rank's file.
  std::string FirstTensorOf(int rank) {
    const proto::CheckpointManifest manifest = Manifest();
    const int64_t first = manifest.files(rank).storage_ranges(0);
    return manifest.storages(static_cast<int>(first)).tensors(0).name();
  }
  std::vector<std::string> Names() {
    return Folder::Open(dir_, FileSystem::Real())->Names().value();
  }
  void FlipByte(const std::string& file, int64_t at) {
    std::fstream stream(dir_ + "/" + file,
                        std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char byte = static_cast<char>(stream.get());
    stream.seekp(at);
    stream.put(static_cast<char>(byte ^ 1));
    ASSERT_TRUE(stream.good());
  }
  // Expects that loading is refused on all ranks with these words, and that
  // nothing changes.
  template <typename Matcher>
  void ExpectRefused(const Matcher& matcher) {
    std::vector<std::string> answers = Run("LoadFails", 2);
    for (std::string& answer : answers) {
      const size_t end = answer.find('\n');
      EXPECT_THAT(answer.substr(0, end), matcher);
      answer = end == std::string::npos ? "" : answer.substr(end + 1);
    }
    ExpectOracle(answers, spec_, 2, 0);
  }

  const TempFolder folder_;
  std::string dir_ = folder_ / "ckpt";
  TrainingSpec spec_;
};

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_CHECKPOINT_TEST_UTIL_H_
