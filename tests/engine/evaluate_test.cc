// Evaluations over ranks: each sample once, the same bits at every world size
// and stage, all forwards on all ranks, and everything as it was afterwards.
#include "evaluation/evaluate.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/autocast_mode.h"
#include "absl/strings/match.h"
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
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kInputs = 6, kClasses = 5;

// Its second normalization stays in evaluation mode.
struct NetImpl : nn::Module {
  NetImpl() {
    at::manual_seed(1);
    up = register_module("up", nn::Linear(kInputs, 16));
    norm = register_module("norm", nn::BatchNorm1d(16));
    frozen = register_module("frozen", nn::BatchNorm1d(16));
    dropout = register_module("dropout", nn::Dropout(0.5));
    head = register_module("head", nn::Linear(16, kClasses));
    frozen->eval();
  }
  Tensor forward(const Tensor& x) {
    return head(dropout(frozen(norm(torch::relu(up(x))))));
  }
  // Which of the modules are in training mode.
  std::string Modes() const {
    std::string modes;
    for (const auto& each : modules()) modes += each->is_training() ? 'T' : 'e';
    return modes;
  }
  nn::Linear up{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr}, frozen{nullptr};
  nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Net);

// Returns the samples' inputs and labels, the same on all ranks.
std::pair<Tensor, Tensor> SamplesOf(absl::Span<const int64_t> samples) {
  Tensor inputs = torch::empty({static_cast<int64_t>(samples.size()), kInputs});
  Tensor labels =
      torch::empty({static_cast<int64_t>(samples.size())}, torch::kLong);
  for (size_t i = 0; i < samples.size(); ++i) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(samples[i]);
    const auto row = static_cast<int64_t>(i);
    inputs[row].copy_(torch::randn({kInputs}, random));
    labels[row] = samples[i] % kClasses;
  }
  return {inputs, labels};
}

struct Rig {
  static absl::StatusOr<std::unique_ptr<Rig>> Make(const TrainingSpec& spec,
                                                   const World& world,
                                                   bool autocast = false) {
    auto rig = std::make_unique<Rig>();
    proto::Config config = ConfigOf(spec);
    config.mutable_torch_autocast()->set_enabled(autocast);
    EngineOptions options;
    options.communicator = world.communicator();
    TESSERA_ASSIGN_OR_RETURN(rig->engine,
                             Engine::Create(rig->net, config, options));
    return rig;
  }

  absl::Status Train(int rank, int step) {
    at::manual_seed(100 * step + rank);
    const auto [inputs, labels] = SamplesOf({rank, rank + 10, rank + 20});
    Tensor logits;
    {
      const AutocastScope autocast(engine.get());
      logits = net(inputs);
    }
    TESSERA_RETURN_IF_ERROR(engine->Backward(
        nn::functional::cross_entropy(logits.to(at::kFloat), labels)));
    return engine->Step();
  }

  absl::Status Add(const Tensor& inputs, const Tensor& labels) {
    const Tensor logits = net(inputs);
    loss.Add(nn::functional::cross_entropy(
        logits.to(at::kFloat), labels,
        nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone)));
    accuracy.Add(logits, labels);
    perplexity.AddLogits(logits, labels);
    return absl::OkStatus();
  }
  AddSamples add() {
    return [this](absl::Span<const int64_t> samples) {
      ++forwards;
      const auto [inputs, labels] = SamplesOf(samples);
      return Add(inputs, labels);
    };
  }
  std::vector<Metric*> metrics() { return {&loss, &accuracy, &perplexity}; }
  std::string Result() const {
    return absl::StrFormat("loss %a accuracy %a perplexity %a of %g",
                           loss.value(), accuracy.value(), perplexity.value(),
                           loss.weight());
  }

  Net net;
  std::unique_ptr<Engine> engine;
  Mean loss{"loss"};
  Accuracy accuracy;
  Perplexity perplexity;
  int64_t forwards = 0;
};

TrainingSpec SpecOf(absl::string_view stage) {
  TrainingSpec spec;
  spec.stage = stage[0] - '0';
  spec.param_persistence_threshold = 0;
  // Gathers are collectives.
  if (stage == "3together") spec.shared = spec.served = "off";
  return spec;
}

// `args`: "<stage> <samples> <batch>". Returns the number of forwards, then the
// metrics.
TESSERA_RANK_FUNCTION(EvaluateSamples) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(SpecOf(words[0]), world));
  Rig& rig = *made;
  EvaluateOptions options;
  options.batch_size = std::stoi(words[2]);
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

// `args`: "<stage> <fault>". Returns the error, and that of a step after it.
TESSERA_RANK_FUNCTION(EvaluateWrongly) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const std::string& fault = words[1];
  const bool mine = world.rank() == 1 || fault == "allthrow";
  TESSERA_ASSIGN_OR_RETURN(const auto made, Rig::Make(SpecOf(words[0]), world));
  Rig& rig = *made;
  const int64_t samples = fault == "number" ? 5 + world.rank()
                          : fault == "none" ? 0
                                            : 5;
  std::vector<Metric*> metrics = rig.metrics();
  if (fault == "metrics" && mine) metrics.pop_back();
  absl::Status got;
  if (fault == "next") {
    got = EvaluateBatches(
        rig.engine.get(), metrics,
        [&]() -> absl::StatusOr<std::vector<Tensor>> {
          if (mine) return absl::DataLossError("a broken file");
          return std::vector<Tensor>{torch::zeros({1, kInputs})};
        },
        [](const std::vector<Tensor>&) {
          return absl::InternalError("a forward");
        });
  } else {
    got = Evaluate(rig.engine.get(), metrics, samples,
                   [&](absl::Span<const int64_t> some) -> absl::Status {
                     if (mine && absl::EndsWith(fault, "throw")) {
                       throw std::runtime_error("a user's mistake");
                     }
                     if (mine && fault == "error") {
                       return absl::DataLossError("a broken sample");
                     }
                     return rig.add()(some);
                   });
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
      {"number", "INVALID_ARGUMENT: the evaluation differs between rank 0 (5 "},
      {"metrics", "INVALID_ARGUMENT: the list of metrics differs between"},
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
  EXPECT_THAT(RunOnRanks(2, "EvaluateWrongly", "3together throw"),
              Each(AllOf(HasSubstr("rank 1 failed: Evaluate: a user's mistake"),
                         Not(HasSubstr("then OK")))));
  EXPECT_THAT(RunOnRanks(2, "EvaluateWrongly", "3together allthrow"),
              Each(AllOf(HasSubstr("rank 0: Evaluate: a user's mistake"),
                         HasSubstr("then OK"))));
}

}  // namespace
}  // namespace tessera
