// Runs models and loops as users write them on two ranks: they give the bits of
// a plain libtorch loop (plain_rig.cc), or an error that says what to do;
// nothing else.
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/rank_pool.h"
#include "tests/zoo/other_answers.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

std::string BytesOf(const Tensor& t) {
  const Tensor whole = t.resolve_conj().contiguous();
  return std::string(static_cast<const char*>(whole.const_data_ptr()),
                     whole.nbytes());
}

// Returns "" if equal; all NaNs count as equal.
std::string DifferenceOf(const Results& plain, const Results& engine) {
  if (plain.size() != engine.size()) {
    return absl::StrCat(plain.size(), " results, ", engine.size(),
                        " by the engine");
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto& [name, expected] = plain[i];
    const Tensor& got = engine[i].second;
    if (name != engine[i].first || expected.sizes() != got.sizes() ||
        expected.dtype() != got.dtype()) {
      return absl::StrCat(name, " ", expected.toString(), ", by the engine ",
                          engine[i].first, " ", got.toString());
    }
    if (BytesOf(expected) == BytesOf(got)) continue;
    const Tensor differ =
        expected.ne(got).logical_and(expected.eq(expected) | got.eq(got));
    if (!differ.any().item<bool>()) {
      if (expected.ne(expected).any().item<bool>()) continue;
      return absl::StrCat(name, ": zeros of another sign");
    }
    const auto first = differ.flatten().nonzero()[0].item<int64_t>();
    std::ostringstream values;
    values.precision(12);
    values << expected.flatten()[first].item() << ", by the engine "
           << got.flatten()[first].item();
    return absl::StrCat(name, ": element ", first, " ", values.str(), "; ",
                        differ.sum().item<int64_t>(), " of ", got.numel(),
                        " differ");
  }
  return "";
}

// Returns what the variant leaves with plain libtorch; the same for all ways.
const Results& PlainResults(const std::string& name, const World& world) {
  static auto* const known = new std::map<std::string, Results>;
  const auto found = known->find(name);
  if (found != known->end()) return found->second;
  const auto rig = MakePlainRig(world.communicator());
  Variants().at(name).run(*rig);
  return known->emplace(name, rig->Finish()).first->second;
}

std::string MessageOf(const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  return torch == nullptr ? error.what() : torch->what_without_backtrace();
}

// args: "WAY NAME". "equal", "equal, but ...", "other: ..." or
// "error: ...".
TESSERA_RANK_FUNCTION(RunVariant) {
  const std::vector<std::string> parts = absl::StrSplit(args, ' ');
  const Variant& variant = Variants().at(parts[1]);
  const Results* plain = nullptr;
  const bool refused = !variant.error.empty() && !variant.may_be_equal;
  if (!refused) plain = &PlainResults(parts[1], world);
  Results results;
  std::string outcome;
  try {
    const auto rig = MakeEngineRig(parts[0], world.communicator());
    variant.run(*rig);
    results = rig->Finish();
    outcome = rig->Outcome();
  } catch (const std::exception& error) {
    return absl::StrCat("error: ", MessageOf(error));
  }
  if (plain == nullptr) return "no error";
  const std::string difference = DifferenceOf(*plain, results);
  if (!difference.empty()) return absl::StrCat("other: ", difference);
  return outcome.empty() ? "equal" : absl::StrCat("equal, but ", outcome);
}

RankPool* PoolOf(absl::string_view way) {
  static auto* const pools = new std::map<std::string, RankPool*>;
  RankPool*& pool = (*pools)[BackendOf(way)];
  if (pool != nullptr) return pool;
  if (BackendOf(way) == DefaultBackend()) return pool = RankPool::Get(2);
  RankPoolOptions options;
  options.backend = BackendOf(way);
  static const auto other = std::make_unique<RankPool>(options);
  return pool = other.get();
}

using Cell = std::tuple<std::string, std::string>;  // variant, way

// Each variant goes each way, except that every other one leaves out Stage3:
// its stage, its memory, and that forwards run once, are those of other ways,
// too.
std::vector<Cell> Cells() {
  std::vector<Cell> cells;
  bool all = true;
  for (const auto& variant : Variants()) {
    for (const std::string& way : Ways()) {
      if (all || way != "Stage3") cells.emplace_back(variant.first, way);
    }
    all = !all;
  }
  return cells;
}

class UserZooTest : public ::testing::TestWithParam<Cell> {};

INSTANTIATE_TEST_SUITE_P(All, UserZooTest, ::testing::ValuesIn(Cells()),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

// Values are never others.
void ExpectOther(const OtherAnswer& other,
                 const std::vector<std::string>& answers) {
  int others = 0;
  for (const std::string& answer : answers) {
    EXPECT_FALSE(absl::StartsWith(answer, "other: ")) << answer;
    others += absl::StrContains(answer, other.text) ? 1 : 0;
  }
  EXPECT_GT(others, 0) << "expected \"" << other.text << "\" of some rank ("
                       << other.why
                       << "), got: " << absl::StrJoin(answers, "; ");
}

TEST_P(UserZooTest, HasTheBitsOfAPlainLoopOrSaysWhatToDo) {
  const std::string capability = at::get_cpu_capability();
  if (capability != "AVX2" && capability != "AVX512") {
    GTEST_SKIP() << "libtorch's fused AdamW rounds otherwise without FMA";
  }
  const auto& [name, way] = GetParam();
  const Variant& variant = Variants().at(name);
  std::vector<std::string> answers;
  for (const auto& answer :
       PoolOf(way)->Run("RunVariant", absl::StrCat(way, " ", name))) {
    answers.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  if (const OtherAnswer* const other = FindOtherAnswer(way, name)) {
    return ExpectOther(*other, answers);
  }
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const std::string& answer = answers[rank];
    if (variant.may_be_equal && answer == "equal") continue;
    if (variant.error.empty()) {
      EXPECT_EQ(answer, "equal") << "rank " << rank;
    } else {
      EXPECT_TRUE(absl::StartsWith(answer, "error: ") &&
                  absl::StrContains(answer, variant.error))
          << "rank " << rank << ": " << answer;
    }
  }
}

TEST(UserZoo, IsLargeEnough) { EXPECT_GE(Variants().size(), 65u); }

}  // namespace
}  // namespace tessera::zoo
