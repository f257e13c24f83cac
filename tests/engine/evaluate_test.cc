// Evaluations over ranks: each sample once, the same bits at every world size
// and stage, all forwards on all ranks, and everything as it was afterwards.
#include "evaluation/evaluate.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/autocast_mode.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/evaluate_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace evaluate_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// `args`: "<stage> <samples> <batch>". Returns the number of forwards, then the
// metrics.
TESSERA_RANK_FUNCTION(EvaluateSamples) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(SpecOf(words[0]), world));
  Rig& rig = *made;
  EvaluateOptions options;
  options.batch_size = std::stoll(words[2]);
  TESSERA_RETURN_IF_ERROR(Evaluate(rig.engine.get(), rig.metrics(),
                                   std::stoi(words[1]), rig.add(), options));
  TESSERA_RETURN_IF_ERROR(rig.engine->Close());
  return absl::StrCat(rig.forwards, " forwards: ", rig.Result());
}

// What one gets from a loop on one rank, without an engine.
std::string ByHand(int64_t samples, int64_t batch) {
  const at::NoGradGuard no_grad;
  Rig rig;
  rig.net->eval();
  double loss = 0, correct = 0;
  for (int64_t begin = 0; begin < samples; begin += batch) {
    std::vector<int64_t> some;
    for (int64_t i = begin; i < std::min(begin + batch, samples); ++i) {
      some.push_back(i);
    }
    const auto [inputs, labels] = SamplesOf(some);
    const Tensor logits = rig.net(inputs);
    const Tensor losses = nn::functional::cross_entropy(
        logits, labels,
        nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
    for (size_t i = 0; i < some.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      loss += losses[row].item<float>();
      correct += logits[row].argmax().item<int64_t>() == some[i] % kClasses;
    }
  }
  const auto n = static_cast<double>(samples);
  return absl::StrFormat("loss %.12g accuracy %a of %g", loss / n, correct / n,
                         n);
}

TEST(EvaluateTest, EachSampleCountsOnceWithTheSameBits) {
  // 5 batches, the last one of 1 sample: the last rank has one less.
  const std::string one = RunOnRanks(1, "EvaluateSamples", "0 17 4")[0];
  ASSERT_THAT(one, StartsWith("5 forwards: loss "));
  const std::vector<std::string> parts = absl::StrSplit(one, ' ');
  double loss = 0;
  ASSERT_TRUE(absl::SimpleAtod(parts[3], &loss));
  EXPECT_EQ(
      absl::StrFormat("loss %.12g accuracy %s of %s", loss, parts[5], parts[9]),
      ByHand(17, 4));
  const std::string result = one.substr(one.find(':'));
  for (const char* const stage : {"0", "2", "3", "3together"}) {
    EXPECT_THAT(RunOnRanks(2, "EvaluateSamples", absl::StrCat(stage, " 17 4")),
                Each("3 forwards" + result))
        << stage;
    EXPECT_THAT(RunOnRanks(3, "EvaluateSamples", absl::StrCat(stage, " 17 4")),
                Each("2 forwards" + result))
        << stage;
  }
}

TEST(EvaluateTest, ABatchMayBeLargerThanAllSamples) {
  EXPECT_THAT(RunOnRanks(2, "EvaluateSamples", "0 3 9223372036854775807"),
              Each(AllOf(StartsWith("1 forwards"), EndsWith(" of 3"))));
}

TEST(EvaluateTest, RanksWithoutSamplesTakePart) {
  const std::string one = RunOnRanks(1, "EvaluateSamples", "0 3 4")[0];
  EXPECT_THAT(RunOnRanks(3, "EvaluateSamples", "3together 3 4"), Each(one));
}

// `args`: "<stage>". Rank 0 has no batch, rank 1 has 3, rank 2 has 1.
TESSERA_RANK_FUNCTION(EvaluateOwn) {
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(SpecOf(args), world));
  Rig& rig = *made;
  const int64_t batches = world.rank() == 0 ? 0 : 5 - 2 * world.rank();
  int64_t taken = 0;
  std::string zeros = "no zeros";
  TESSERA_RETURN_IF_ERROR(EvaluateBatches(
      rig.engine.get(), rig.metrics(),
      [&]() -> absl::StatusOr<std::vector<Tensor>> {
        if (taken == batches) return std::vector<Tensor>();
        const auto [inputs, labels] =
            SamplesOf({2 * taken, 2 * taken + world.rank()});
        ++taken;
        return std::vector<Tensor>{inputs, labels};
      },
      [&](const std::vector<Tensor>& batch) {
        ++rig.forwards;
        if (!batch[0].any().item<bool>()) {
          zeros = absl::StrCat("zeros ", batch[0].toString(), " [",
                               batch[0].size(0), "] ", batch[1].toString());
        }
        return rig.Add(batch[0], batch[1]);
      }));
  TESSERA_RETURN_IF_ERROR(rig.engine->Close());
  return absl::StrCat(rig.forwards, " forwards of ", rig.loss.weight(), ", ",
                      zeros, ", ", rig.Result());
}

TEST(EvaluateTest, RanksHaveDifferentNumbersOfBatches) {
  for (const char* const stage : {"0", "3", "3together"}) {
    const std::vector<std::string> got = RunOnRanks(3, "EvaluateOwn", stage);
    EXPECT_THAT(
        got,
        ElementsAre(
            StartsWith("3 forwards of 8, zeros CPUFloatType [2] CPULongType"),
            StartsWith("3 forwards of 8, no zeros"),
            StartsWith("3 forwards of 8, no zeros")));
    EXPECT_EQ(got[1], got[2]);
    const auto result = [](const std::string& text) {
      return text.substr(text.rfind(", "));
    };
    EXPECT_EQ(result(got[0]), result(got[1]));
  }
}

// `args`: "evaluate" or "". Returns what differs from before, and the
// parameters after training.
TESSERA_RANK_FUNCTION(TrainAround) {
  TrainingSpec spec = SpecOf("3");
  spec.optimizer = "type:'AdamW',params{lr:0.01,ema_decay:0.5}";
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(spec, world, true));
  Rig& rig = *made;
  at::set_num_threads(2);
  std::string said;
  for (int step = 0; step < 4; ++step) {
    TESSERA_RETURN_IF_ERROR(rig.Train(world.rank(), step));
    if (args.empty()) continue;
    const std::string before = rig.net->Modes();
    EvaluateOptions options;
    options.one_thread = true;
    options.averages = step % 2 == 0;
    std::set<std::string> within;
    TESSERA_RETURN_IF_ERROR(Evaluate(
        rig.engine.get(), rig.metrics(), 5,
        [&](absl::Span<const int64_t> samples) {
          within.insert(absl::StrCat(
              rig.net->Modes(), " gradients ", at::GradMode::is_enabled(),
              " autocast ", at::autocast::is_autocast_enabled(at::kCPU),
              " threads ", at::get_num_threads()));
          return rig.add()(samples);
        },
        options));
    const std::string want = "eeeeee gradients 0 autocast 1 threads 1";
    if (within != std::set<std::string>{want}) {
      absl::StrAppend(&said, "within: ", absl::StrJoin(within, ", "), "\n");
    }
    if (rig.net->Modes() != before || !at::GradMode::is_enabled() ||
        at::autocast::is_autocast_enabled(at::kCPU) ||
        at::get_num_threads() != 2) {
      absl::StrAppend(&said, "after: ", rig.net->Modes(), ", before: ", before,
                      "\n");
    }
  }
  TESSERA_ASSIGN_OR_RETURN(const Record record,
                           ParametersOf(*rig.engine, *rig.net));
  at::set_num_threads(1);
  TESSERA_RETURN_IF_ERROR(rig.engine->Close());
  return said + ToText(record);
}

TEST(EvaluateTest, EverythingIsAsItWas) {
  const std::vector<std::string> without = RunOnRanks(2, "TrainAround", "");
  EXPECT_THAT(without, Each(StartsWith("parameter up.weight")));
  EXPECT_EQ(RunOnRanks(2, "TrainAround", "evaluate"), without);
}

// Returns the loss with and without averages, by options and by hand.
TESSERA_RANK_FUNCTION(EvaluateAverages) {
  TrainingSpec spec = SpecOf("2");
  if (args == "kept") {
    spec.optimizer = "type:'AdamW',params{lr:0.1,ema_decay:0.9}";
  }
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(spec, world));
  Rig& rig = *made;
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(rig.Train(world.rank(), step));
  }
  const auto loss_with = [&](bool averages) -> absl::StatusOr<double> {
    EvaluateOptions options;
    options.averages = averages;
    TESSERA_RETURN_IF_ERROR(
        Evaluate(rig.engine.get(), {&rig.loss}, 6, rig.add(), options));
    return rig.loss.value();
  };
  TESSERA_ASSIGN_OR_RETURN(const double trained, loss_with(false));
  TESSERA_ASSIGN_OR_RETURN(const double averaged, loss_with(true));
  double by_hand = 0;
  {
    TESSERA_ASSIGN_OR_RETURN(AveragesScope scope,
                             AveragesScope::Open(rig.engine.get()));
    TESSERA_ASSIGN_OR_RETURN(by_hand, loss_with(false));
    TESSERA_RETURN_IF_ERROR(scope.Close());
    TESSERA_RETURN_IF_ERROR(scope.Close());
  }
  TESSERA_ASSIGN_OR_RETURN(const double again, loss_with(false));
  TESSERA_RETURN_IF_ERROR(rig.Train(world.rank(), 3));
  TESSERA_RETURN_IF_ERROR(rig.engine->Close());
  return absl::StrCat(averaged == by_hand, trained == again,
                      trained == averaged);
}

TEST(EvaluateTest, AveragesAreEvaluatedAndLeave) {
  EXPECT_THAT(RunOnRanks(2, "EvaluateAverages", "kept"), Each("110"));
  EXPECT_THAT(RunOnRanks(2, "EvaluateAverages", ""),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("no averages are kept"))));
}

}  // namespace
}  // namespace evaluate_test
}  // namespace tessera
