// Tests which operators write parameters: a user's operator that does not say
// so costs nothing, and is named if it writes all the same; running statistics
// that are parameters are refused by name. Writes at places that depend on an
// input are in placed_writes_test.cc.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/shard_server.h"
#include "comm/shared_memory.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/engine/operator_writes_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "torch/library.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Through raw pointers, which no other operator sees.
at::Tensor First(const at::Tensor& w) {
  return torch::full({}, w.const_data_ptr<float>()[0]);
}
void Write(const at::Tensor& w) { w.mutable_data_ptr<float>()[0] = 5; }
void WriteRows(const at::Tensor& w, const at::Tensor& rows) {
  for (int64_t i = 0; i < rows.numel(); ++i) {
    w.mutable_data_ptr<float>()[w.size(1) * rows[i].item<int64_t>()] = 5;
  }
}

TORCH_LIBRARY(operator_writes_test, m) {
  m.def("first(Tensor w) -> Tensor", &First);
  m.def("writes(Tensor(a!) w) -> ()", &Write);
  m.def("lies(Tensor w) -> ()", &Write);
  m.def("write_rows(Tensor(a!) w, Tensor rows) -> ()", &WriteRows);
}

struct Block : torch::nn::Module {
  Block() : weight(register_parameter("weight", torch::ones({40000}))) {}
  at::Tensor weight;
};

struct Blocks : torch::nn::Module {
  Blocks() {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(
          register_module(absl::StrCat("block", i), std::make_shared<Block>()));
    }
  }
  std::vector<std::shared_ptr<Block>> blocks;
};

// Delegates what memory is shared, and shards that are served, to the inner
// communicator.
class SharingRecorder : public FakeCommunicator {
 public:
  explicit SharingRecorder(std::shared_ptr<Communicator> inner)
      : FakeCommunicator(inner), inner_(std::move(inner)) {}
  absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      int64_t bytes, CommTag tag) override {
    return inner_->ShareMemory(bytes, std::move(tag));
  }
  absl::StatusOr<std::unique_ptr<ShardServer>> ServeShards(
      CommTag name) override {
    return inner_->ServeShards(std::move(name));
  }

 private:
  const std::shared_ptr<Communicator> inner_;
};

// args: an operator's name. Returns what the operator on every block leaves in
// the ledger, what it took at most, and the collectives that it made.
TESSERA_RANK_FUNCTION(CostOfOperator) {
  auto model = std::make_shared<Blocks>();
  auto comm = std::make_shared<SharingRecorder>(world.communicator());
  TESSERA_ASSIGN_OR_RETURN(auto engine, Create(model, comm, /*stage=*/3));
  comm->Take();
  MemoryLedger& ledger = MemoryLedger::Host();
  ledger.ResetPeak();
  const int64_t before = ledger.total().current_bytes;
  torch::NoGradGuard no_grad;
  for (auto& block : model->blocks) {
    if (args == "first") {
      Find<at::Tensor(const at::Tensor&)>("first").call(block->weight);
    } else {
      Find<void(const at::Tensor&)>(std::string(args)).call(block->weight);
    }
  }
  const int64_t left = ledger.total().current_bytes - before;
  const int64_t most = ledger.total().peak_bytes - before;
  const size_t calls = comm->Take().size();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat("left ", left, ", at the most ", most, ", calls ", calls);
}

TEST(OperatorWritesTest, AnOperatorThatDeclaresNoWriteCostsNoCopy) {
  constexpr int64_t kBlockBytes = 40064 * sizeof(float);  // of two shards
  EXPECT_THAT(RunOnRanks(2, "CostOfOperator", "first"),
              Each(absl::StrCat("left 0, at the most ",
                                Shares() ? 0 : kBlockBytes, ", calls 0")));
  // This shows that the measurement sees a cost.
  EXPECT_THAT(RunOnRanks(2, "CostOfOperator", "writes"),
              Each(absl::StrCat("left ", 3 * kBlockBytes, ", at the most ",
                                3 * kBlockBytes, ", calls 0")));
}

// args: "check_writes" or "". Rank 0 alone calls it, where it ends the process.
TESSERA_RANK_FUNCTION(CallTheLiar) {
  auto model = std::make_shared<Blocks>();
  TESSERA_ASSIGN_OR_RETURN(auto engine, Create(model, world.communicator(),
                                               /*stage=*/3, !args.empty()));
  if (Shares() && world.rank() == 1) {
    return world.communicator()->Barrier("end").ToString();
  }
  torch::NoGradGuard no_grad;
  auto first = Find<at::Tensor(const at::Tensor&)>("first");
  auto lies = Find<void(const at::Tensor&)>("lies");
  const absl::Status status = CatchTorch("forward", [&] {
    first.call(model->blocks[0]->weight);
    lies.call(model->blocks[1]->weight);
  });
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return status.ToString();
}

TEST(OperatorWritesTest, AWriteAgainstTheSchemaIsNamedInTheDebuggingMode) {
  if (Shares()) GTEST_SKIP() << "see the next test";
  EXPECT_THAT(RunOnRanks(2, "CallTheLiar", "check_writes"),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION: [block1] operator "
                                   "operator_writes_test::lies wrote parameter "
                                   "'block1.weight'"),
                         HasSubstr("Tensor(a!)"))));
}

TEST(OperatorWritesTest, AWriteAgainstTheSchemaIntoSharedMemoryIsNamed) {
  if (!Shares()) GTEST_SKIP() << "nothing is shared";
  RankPool pool(RankPoolOptions{});
  const auto answers = pool.Run("CallTheLiar", "");
  EXPECT_THAT(pool.stderr_of(0),
              HasSubstr("operator operator_writes_test::lies"));
#if !__has_feature(address_sanitizer)  // whose report leaves the end of ours
  EXPECT_THAT(pool.stderr_of(0),
              AllOf(HasSubstr("Tensor(a!)"),
                    HasSubstr("into parameter 'block1.weight'")));
#endif
  EXPECT_THAT(answers[0],
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("signal")));
}

// ---- running statistics

struct StatisticsImpl : torch::nn::Module {
  StatisticsImpl()
      : weight(register_parameter("weight", torch::ones({8}))),
        mean(register_parameter("mean", torch::zeros({8}), false)),
        var(register_parameter("var", torch::ones({8}), false)) {}
  at::Tensor forward(const std::string& how) {
    const at::Tensor x = torch::arange(64.0).view({2, 8, 4}) * weight[0];
    const bool training = !absl::StrContains(how, "evaluation");
    return absl::StrContains(how, "batch")
               ? torch::batch_norm(x, weight, {}, mean, var, training, 0.1,
                                   1e-5, false)
               : torch::instance_norm(x, weight, {}, mean, var, training, 0.1,
                                      1e-5, false);
  }
  at::Tensor weight, mean, var;
};

// args: which statistics. Returns the status of a forward, by stage.
TESSERA_RANK_FUNCTION(StatisticsAsParameters) {
  std::string statuses;
  for (int stage = 0; stage <= 3; ++stage) {
    auto model = std::make_shared<StatisticsImpl>();
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             Create(model, world.communicator(), stage));
    const absl::Status status =
        CatchTorch("forward", [&] { model->forward(std::string(args)); });
    absl::StrAppend(&statuses, status.ToString(), "\n");
    TESSERA_RETURN_IF_ERROR(engine->Close());
    if (!torch::equal(model->mean, torch::zeros({8}))) {
      return absl::InternalError("the statistics have changed");
    }
  }
  return statuses;
}

TEST(OperatorWritesTest, StatisticsOfEachRanksDataAreNoParameters) {
  for (const char* how : {"batch", "instance"}) {
    const std::string error = absl::StrCat(
        "parameter 'mean' is a running statistic that aten::", how,
        "_norm updates, on each rank with its own data; register it with "
        "register_buffer, or name it in sharding.ignored_parameters");
    const auto answers = RunOnRanks(2, "StatisticsAsParameters", how);
    for (const std::string& answer : answers) {
      const std::vector<std::string> errors =
          absl::StrSplit(answer, '\n', absl::SkipEmpty());
      EXPECT_EQ(errors.size(), 4) << answer;
      EXPECT_THAT(errors, Each(HasSubstr(error)));
    }
  }
}

TEST(OperatorWritesTest, StatisticsThatAreOnlyReadMayBeParameters) {
  EXPECT_THAT(RunOnRanks(2, "StatisticsAsParameters", "batch evaluation"),
              Each("OK\nOK\nOK\nOK\n"));
}

}  // namespace
}  // namespace tessera
