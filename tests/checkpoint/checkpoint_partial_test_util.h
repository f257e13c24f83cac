// PartialTest saves a checkpoint, and loads parts of it into another run
// (checkpoint_partial_test.cc defines its rank function).
#ifndef TESTS_CHECKPOINT_CHECKPOINT_PARTIAL_TEST_UTIL_H_
#define TESTS_CHECKPOINT_CHECKPOINT_PARTIAL_TEST_UTIL_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "tests/checkpoint/checkpoint_test_util.h"

namespace tessera {

inline constexpr char kCut[] = "\n--\n";

class PartialTest : public CheckpointTest {
 protected:
  // The keys are "<name> <state>" and "step".
  using State = std::map<std::string, std::string>;
  struct Loaded {
    State before, after;
    std::string said;
  };

  PartialTest() {
    spec_.model = "Gpt";
    spec_.dtype = "bf16";
    spec_.steps = 2;
  }

  static State Parse(const std::string& text) {
    State state;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      std::vector<std::string> words =
          absl::StrSplit(line, absl::MaxSplits(' ', 2));
      if (words[0] == "step") {
        state["step"] = words[1];
      } else {
        state[absl::StrCat(words[0], " ", words[1])] = words[2];
      }
    }
    return state;
  }

  State Save(const std::string& model) {
    spec_.model = model;
    const std::string text =
        RunOn(3, "TrainSaveAndTell", spec_, absl::StrCat(dir_, model))[0];
    EXPECT_THAT(text, ::testing::StartsWith("step 2\n"));
    return Parse(text);
  }

  // Returns what all ranks report.
  Loaded Load(const std::string& of, const std::vector<std::string>& options) {
    const std::vector<std::string> answers =
        RunOn(kWorldSize, "TrainAndLoadPart", spec_,
              absl::StrCat(dir_, of, "\n", absl::StrJoin(options, "\n")));
    EXPECT_EQ(answers[0], answers[1]);
    const std::vector<std::string> parts = absl::StrSplit(answers[0], kCut);
    if (parts.size() != 3) {
      ADD_FAILURE() << answers[0];
      return {};
    }
    return {Parse(parts[0]), Parse(parts[2]), parts[1]};
  }

  // Expects that a key has what `from` says for it; "": its value of before.
  static void ExpectFrom(
      const State& saved, const Loaded& got,
      const std::function<std::string(const std::string&)>& from) {
    int loaded = 0, left = 0;
    for (const auto& [key, line] : got.after) {
      const std::string source = from(key);
      EXPECT_EQ(line, source.empty() ? got.before.at(key) : saved.at(source))
          << key;
      ++(source.empty() ? left : loaded);
    }
    EXPECT_GT(loaded, 0);
    EXPECT_EQ(got.after.size(), got.before.size());
  }
};

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_CHECKPOINT_PARTIAL_TEST_UTIL_H_
