// Errors of evaluations: that of one rank is that of all, and training goes on.
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "evaluation/evaluate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/evaluate_test_util.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace evaluate_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// `args`: "<stage> <fault>", and "averages" if these are evaluated. Returns the
// error, and that of a step after it.
TESSERA_RANK_FUNCTION(EvaluateWrongly) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const std::string& fault = words[1];
  const bool mine = world.rank() == 1 || fault == "allthrow";
  EvaluateOptions options;
  TrainingSpec spec = SpecOf(words[0]);
  if (words.size() > 2) {
    options.averages = true;
    spec.optimizer = "type:'AdamW',params{lr:0.1,ema_decay:0.9}";
  }
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(spec, world));
  Rig& rig = *made;
  const int64_t samples = fault == "number" ? 5 + world.rank()
                          : fault == "none" ? 0
                                            : 5;
  std::vector<Metric*> metrics = rig.metrics();
  if (fault == "metrics" && mine) metrics.pop_back();
  absl::Status got;
  if (fault == "next" || fault == "undefined") {
    got = EvaluateBatches(
        rig.engine.get(), metrics,
        [&]() -> absl::StatusOr<std::vector<Tensor>> {
          if (mine && fault == "undefined")
            return std::vector<Tensor>{Tensor()};
          if (mine) return absl::DataLossError("a broken file");
          return std::vector<Tensor>{torch::zeros({1, kInputs})};
        },
        [](const std::vector<Tensor>&) {
          return absl::InternalError("a forward");
        });
  } else {
    got = Evaluate(
        rig.engine.get(), metrics, samples,
        [&](absl::Span<const int64_t> some) -> absl::Status {
          if (mine && absl::EndsWith(fault, "throw")) {
            throw std::runtime_error("a user's mistake");
          }
          if (mine && fault == "error") {
            return absl::DataLossError("a broken sample");
          }
          return rig.add()(some);
        },
        options);
  }
  const absl::Status after = rig.Train(world.rank(), 0);
  if (after.ok()) TESSERA_RETURN_IF_ERROR(rig.engine->Close());
  return absl::StrCat(got.ToString(), " modes ", rig.net->Modes(), " then ",
                      after.ToString());
}

TEST(EvaluateTest, AnErrorOfOneRankIsThatOfAll) {
  const struct {
    std::string fault, error;
  } cases[] = {
      {"throw", "INTERNAL: [evaluation] rank 1: Evaluate: a user's mistake"},
      {"error", "DATA_LOSS: [evaluation] rank 1: a broken sample"},
      {"next", "DATA_LOSS: [Evaluate] rank 1: a broken file"},
      {"undefined", "INVALID_ARGUMENT: [Evaluate] rank 1: a batch of"},
      {"number", "INVALID_ARGUMENT: the evaluation differs between rank 0 (5 "},
      {"metrics",
       "INVALID_ARGUMENT: the evaluation differs between rank 0 (5 "},
      {"none", "FAILED_PRECONDITION: Evaluate: expected samples"},
  };
  for (const auto& [fault, error] : cases) {
    for (const std::string stage : {"0", "3"}) {
      EXPECT_THAT(
          RunOnRanks(2, "EvaluateWrongly", stage + " " + fault),
          Each(AllOf(StartsWith(error), HasSubstr(" modes TTTeTT then OK"))))
          << fault << " at stage " << stage;
    }
  }
}

// The others are inside of a gather, and learn it there.
TEST(EvaluateTest, AnErrorEndsOthersThatGather) {
  for (const std::string averages : {"", " averages"}) {
    EXPECT_THAT(
        RunOnRanks(2, "EvaluateWrongly", "3together throw" + averages),
        Each(AllOf(HasSubstr("rank 1 failed: Evaluate: a user's mistake"),
                   Not(HasSubstr("then OK")))))
        << averages;
    EXPECT_THAT(
        RunOnRanks(2, "EvaluateWrongly", "3together allthrow" + averages),
        Each(AllOf(HasSubstr("rank 0: Evaluate: a user's mistake"),
                   HasSubstr("then OK"))))
        << averages;
  }
}

}  // namespace
}  // namespace evaluate_test
}  // namespace tessera
