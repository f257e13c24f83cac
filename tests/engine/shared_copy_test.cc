// Tests the working copy that the ranks of a host share, and shards that are
// served: nobody reads a half-written weight, a user's write is made once, and
// on one host nothing is gathered.
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "sharding/flat/use.h"
#include "tests/support/libtorch_adamw.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

// Blocks whose elements are all equal, and stay so: each step adds the same to
// all of them, in all units.
struct EvenBlock : torch::nn::Module {
  explicit EvenBlock(int64_t numel)
      : weight(register_parameter("weight", torch::ones({numel}))) {}
  at::Tensor weight;
};

struct EvenModel : torch::nn::Module {
  EvenModel() {
    // Sizes have no tails, which the optimizer's loops round differently.
    for (int64_t numel : {4992, 384, 192, 39936}) {
      blocks.push_back(register_module(absl::StrCat("block", blocks.size()),
                                       std::make_shared<EvenBlock>(numel)));
    }
  }
  at::Tensor Loss() {
    at::Tensor sum = torch::zeros({});
    for (auto& block : blocks) sum = sum + block->weight.sum();
    return sum;
  }
  // An error that names a block with two values, or that differs from the
  // first.
  absl::Status CheckEven() {
    torch::NoGradGuard no_grad;
    const auto first = blocks[0]->weight.max().item<float>();
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto least = blocks[i]->weight.min().item<float>();
      const auto most = blocks[i]->weight.max().item<float>();
      if (least == first && most == first) continue;
      return absl::InternalError(absl::StrCat(
          "block ", i, " has ", least, " to ", most, ", block 0 ", first));
    }
    return absl::OkStatus();
  }
  std::vector<std::shared_ptr<EvenBlock>> blocks;
};

const int kRounds = DefaultBackend() == "shm" ? 1600 : 400;
const int kSharedSteps = DefaultBackend() == "shm" ? 1000 : 120;

TrainingSpec SharedSpec(const std::string& dtype = "fp32") {
  TrainingSpec spec;
  spec.stage = 3;
  (DefaultBackend() == "shm" ? spec.shared : spec.served) = "on";
  spec.dtype = dtype;
  return spec;
}

// At each step another rank alone evaluates, before and after Step, while the
// others are in it. args: a TrainingSpec.
TESSERA_RANK_FUNCTION(EvaluateWhileOthersStep) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  at::set_num_threads(1);
  auto model = std::make_shared<EvenModel>();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::mt19937 random(1);  // the same on all ranks
  for (int step = 0; step < spec.steps; ++step) {
    const auto who = static_cast<int>(random() % world.world_size());
    const auto rounds = random() % 4;
    auto evaluate = [&]() -> absl::Status {
      if (who != world.rank()) return absl::OkStatus();
      for (unsigned i = 0; i < rounds; ++i) {
        TESSERA_RETURN_IF_ERROR(model->CheckEven());
      }
      return absl::OkStatus();
    };
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss()));
    TESSERA_RETURN_IF_ERROR(evaluate());
    TESSERA_RETURN_IF_ERROR(engine->Step());
    TESSERA_RETURN_IF_ERROR(evaluate());
  }
  TESSERA_RETURN_IF_ERROR(model->CheckEven());
  const auto value = model->blocks[0]->weight.max().item<float>();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(value);
}

TEST(SharedCopyTest, ARankThatEvaluatesAloneNeverSeesHalfAStep) {
  for (const char* dtype : {"fp32", "bf16"}) {
    TrainingSpec spec = SharedSpec(dtype);
    spec.steps = kSharedSteps;
    const auto answers = RunOnRanks(3, "EvaluateWhileOthersStep", spec.ToText(),
                                    absl::Seconds(300));
    EXPECT_THAT(answers, Each(Not(HasSubstr("INTERNAL"))));
    EXPECT_THAT(answers, Each(answers[0]));
  }
}

// The last rank cannot step: it has no memory for the states of a block that
// was unfrozen. What the others see then.
TESSERA_RANK_FUNCTION(StepFailsOnOneRank) {
  auto model = std::make_shared<EvenModel>();
  at::Tensor& late = model->blocks[3]->weight;
  late.requires_grad_(false);
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeEngine(model, SharedSpec(), world.communicator()));
  late.requires_grad_(true);
  TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss()));
  MemoryLedger& ledger = MemoryLedger::Host();
  if (world.rank() + 1 == world.world_size()) {
    ledger.SetLimit(ledger.Report().total.current_bytes);
  }
  absl::Status status = engine->Step();
  ledger.SetLimit(MemoryLedger::kNoLimit);
  if (status.ok()) {
    status = CatchTorch("evaluation", [&] { return model->CheckEven(); });
  }
  const absl::Status again =
      CatchTorch("evaluation", [&] { return model->CheckEven(); });
  return absl::StrCat(status.ToString(), "\n\n", again.ToString());
}

TEST(SharedCopyTest, NobodyUsesAStepThatOneRankCouldNotMake) {
  const auto answers = RunOnRanks(3, "StepFailsOnOneRank", "");
  for (const std::string& answer : answers) {
    const std::vector<std::string> statuses = absl::StrSplit(answer, "\n\n");
    ASSERT_EQ(statuses.size(), 2) << answer;
    for (const std::string& status : statuses) {
      EXPECT_THAT(status, AllOf(HasSubstr("cannot allocate"),
                                Not(HasSubstr("INTERNAL"))));
    }
  }
}

// All ranks halve and double every block, at their own pace between steps; the
// engine takes it over at the next collective point.
TESSERA_RANK_FUNCTION(HalveAndDouble) {
  at::set_num_threads(1);
  auto model = std::make_shared<EvenModel>();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      MakeEngine(model, SharedSpec(std::string(args)), world.communicator()));
  float expected = 1;
  std::mt19937 random(7);
  for (int round = 0; round < kRounds; ++round) {
    const bool halve = expected > 100 || (expected > 0.01 && random() % 2 == 0);
    expected *= halve ? 0.5F : 2.0F;
    {
      torch::NoGradGuard no_grad;
      for (auto& block : model->blocks) block->weight.mul_(halve ? 0.5 : 2.0);
    }
    TESSERA_RETURN_IF_ERROR(model->CheckEven());
    if (random() % 4 == 0) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                               engine->Master("block3.weight"));
      if (master.min().item<float>() != expected ||
          master.max().item<float>() != expected) {
        return absl::InternalError(absl::StrCat("round ", round, ": expected ",
                                                expected, ", got ",
                                                master.min().item<float>()));
      }
    }
    if (model->blocks[0]->weight.max().item<float>() == expected) continue;
    return absl::InternalError(
        absl::StrCat("round ", round, ": expected ", expected));
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(model->blocks[3]->weight.min().item<float>());
}

TEST(SharedCopyTest, AWriteOfAllRanksIsMadeOnce) {
  for (const char* dtype : {"fp32", "bf16"}) {
    const auto answers =
        RunOnRanks(2, "HalveAndDouble", dtype, absl::Seconds(300));
    EXPECT_THAT(answers, Each(Not(HasSubstr("INTERNAL"))));
    EXPECT_THAT(answers, Each(answers[0]));
  }
}

// An embedding that renormalises in forward, against a plain one that takes the
// same steps: rows of another norm than 1 would differ at once.
TESSERA_RANK_FUNCTION(Renormalise) {
  at::set_num_threads(1);
  const auto make = [] {
    torch::manual_seed(3);
    return torch::nn::Embedding(
        torch::nn::EmbeddingOptions(50, 8).max_norm(0.5).norm_type(2));
  };
  auto model = make(), plain = make();
  TrainingSpec spec = SharedSpec();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model.ptr(), spec, world.communicator()));
  torch::optim::AdamW optimizer(
      plain->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  std::mt19937 random(5);
  for (int round = 0; round < kRounds; ++round) {
    const at::Tensor rows =
        torch::tensor({static_cast<int64_t>(random() % 50),
                       static_cast<int64_t>(random() % 50)});
    const at::Tensor out = model(rows), expected = plain(rows);
    if (!at::equal(out, expected)) {
      return absl::InternalError(absl::StrCat("round ", round, " differs"));
    }
    if (random() % 3 != 0) continue;
    TESSERA_RETURN_IF_ERROR(engine->Backward(out.square().sum()));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    expected.square().sum().backward();
    // The fused kernel, which torch::optim does not use in C++.
    static at::Tensor first = torch::zeros_like(plain->weight),
                      second = torch::zeros_like(plain->weight);
    static int64_t count = 0;
    LibtorchAdamW(plain->weight, first, second, plain->weight.grad(), ++count,
                  {1e-2, 0.9, 0.999, 1e-8, 0.1});
    plain->weight.mutable_grad().reset();
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return std::string("equal");
}

TEST(SharedCopyTest, EmbeddingsThatRenormaliseInForward) {
  EXPECT_THAT(RunOnRanks(2, "Renormalise", "", absl::Seconds(300)),
              Each("equal"));
}

// ---- what it costs

TESSERA_RANK_FUNCTION(ReportOfTraining) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  const auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), /*first=*/0, &record));
  const std::string report = world.communicator()->Report();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return report;
}

TEST(SharedCopyTest, NothingIsGathered) {
  if (DefaultBackend() != "shm") GTEST_SKIP() << "several hosts gather";
  TrainingSpec spec = SharedSpec();
  spec.model = "Gpt";
  RankPoolOptions options;
  options.world_size = 4;
  RankPool pool(options);  // the report is of all that its ranks ever did
  for (const auto& report : pool.Run("ReportOfTraining", spec.ToText())) {
    EXPECT_THAT(report, IsOkAndHolds(AllOf(HasSubstr("reduce-scatter"),
                                           Not(HasSubstr("all-gather")))));
  }
}

// ---- raw pointers

TESSERA_RANK_FUNCTION(RawPointers) {
  auto model = std::make_shared<EvenModel>();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeEngine(model, SharedSpec(), world.communicator()));
  at::Tensor& weight = model->blocks[1]->weight;
  if (weight.data_ptr<float>()[383] != 1) return absl::InternalError("read");
  {
    auto pin = Use(weight);
    for (int i = 0; i < 384; ++i) weight.data_ptr<float>()[i] = 3;
  }
  TESSERA_ASSIGN_OR_RETURN(at::Tensor master, engine->Master("block1.weight"));
  if (!at::equal(master, torch::full({384}, 3.0))) {
    return absl::InternalError("the write is lost");
  }
  if (args == "write" && world.rank() == 0) {  // the end of the process
    (void)weight.sum();  // waits for the end of the update
    weight.data_ptr<float>()[7] = 1;
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return std::string("kept");
}

TEST(SharedCopyTest, RawPointersMayReadAndWithinUseWrite) {
  if (DefaultBackend() != "shm") GTEST_SKIP() << "units are freed";
  EXPECT_THAT(RunOnRanks(2, "RawPointers", ""), Each("kept"));
}

TEST(SharedCopyTest, AWriteThroughAStalePointerEndsTheProgramWithItsName) {
  if (DefaultBackend() != "shm") GTEST_SKIP() << "units are freed";
  RankPoolOptions options;
  RankPool pool(options);
  const auto answers = pool.Run("RawPointers", "write");
  EXPECT_THAT(pool.stderr_of(0),
              AllOf(HasSubstr("a write through a raw pointer into parameter "
                              "'block1.weight'"),
                    HasSubstr("tessera::Use(w)")));
  EXPECT_THAT(answers[0],
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("signal")));
  EXPECT_THAT(answers[1], StatusIs(absl::StatusCode::kUnavailable,
                                   HasSubstr("rank 0 has ended")));
}

}  // namespace
}  // namespace tessera
