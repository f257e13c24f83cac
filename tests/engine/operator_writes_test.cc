// Tests which operators write parameters: a user's operator that does not say
// so costs nothing, and is named if it writes all the same; running statistics
// that are parameters are refused by name; where ranks write different values
// at places that depend on their input, the parameter is named.
#include <torch/torch.h>

#include <functional>
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
#include "comm/fake_communicator.h"
#include "comm/shard_server.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
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

template <typename Signature>
auto Find(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(absl::StrCat("operator_writes_test::", name).c_str(),
                         "")
      .typed<Signature>();
}

bool Shares() { return DefaultBackend() == "shm"; }

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

// Makes an engine at stage 3 where no unit stays whole without a reason.
absl::StatusOr<std::unique_ptr<Engine>> Create(
    std::shared_ptr<torch::nn::Module> model,
    std::shared_ptr<Communicator> comm, int stage, bool check_writes = false) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.max_live_parameters = 0;
  if (stage == 3) (Shares() ? spec.shared : spec.served) = "on";
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->set_check_writes(check_writes);
  EngineOptions options;
  options.communicator = std::move(comm);
  return Engine::Create(std::move(model), config, options);
}

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
              AllOf(HasSubstr("into parameter 'block1.weight'"),
                    HasSubstr("Tensor(a!)"),
                    HasSubstr("operator operator_writes_test::lies")));
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

// ---- at places that depend on the input

struct Table : torch::nn::Module {
  Table()
      : first(register_module("first", torch::nn::Linear(4, 8))),
        rows(register_module("rows", torch::nn::Embedding(50, 8))) {
    torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.fill_(0.5);
  }
  torch::nn::Linear first;
  torch::nn::Embedding rows;
};

struct PlacedWrite {
  std::string name;
  // Writes to rows of `w`, [50, 8].
  std::function<void(const at::Tensor& w, const at::Tensor& rows)> write;
};

std::vector<PlacedWrite> PlacedWriteCases() {
  const auto index = [](const at::Tensor& w, const at::Tensor& rows) {
    return rows.view({-1, 1}).expand({rows.numel(), w.size(1)});
  };
  const auto ones = [](const at::Tensor& w, const at::Tensor& rows) {
    return torch::ones({rows.numel(), w.size(1)}, w.options());
  };
  const auto mask = [](const at::Tensor& w, const at::Tensor& rows) {
    return torch::zeros({w.size(0), 1}, at::kBool).index_fill_(0, rows, true);
  };
  return {
      {"aten::embedding_renorm_",
       [](const auto& w, const auto& rows) {
         torch::nn::functional::embedding(
             rows, w,
             torch::nn::functional::EmbeddingFuncOptions().max_norm(0.75));
       }},
      {"aten::index_put_",
       [](at::Tensor w, const auto& rows) { w.index_put_({rows}, 2); }},
      {"aten::index_add_",
       [=](const auto& w, const auto& rows) {
         w.index_add_(0, rows, ones(w, rows));
       }},
      {"aten::index_copy_",
       [=](const auto& w, const auto& rows) {
         w.index_copy_(0, rows, ones(w, rows));
       }},
      {"aten::index_fill_",
       [](const auto& w, const auto& rows) { w.index_fill_(0, rows, 2); }},
      {"aten::scatter_",
       [=](const auto& w, const auto& rows) {
         w.scatter_(0, index(w, rows), 2);
       }},
      {"aten::scatter_add_",
       [=](const auto& w, const auto& rows) {
         w.scatter_add_(0, index(w, rows), ones(w, rows));
       }},
      {"aten::put_",
       [](const auto& w, const auto& rows) {
         w.put_(rows, torch::ones({rows.numel()}, w.options()));
       }},
      {"aten::masked_fill_",
       [=](const auto& w, const auto& rows) {
         w.masked_fill_(mask(w, rows), 2);
       }},
      {"aten::masked_scatter_",
       [=](const auto& w, const auto& rows) {
         w.masked_scatter_(mask(w, rows), torch::ones_like(w));
       }},
      {"aten::fill_",  // of a row
       [](const auto& w, const auto& rows) {
         w.select(0, rows[0].template item<int64_t>()).fill_(2);
       }},
      {"aten::mul_",  // of some
       [](const auto& w, const auto& rows) {
         w.narrow(0, rows[0].template item<int64_t>(), 3).mul_(2);
       }},
      {"operator_writes_test::write_rows", [](const auto& w, const auto& rows) {
         Find<void(const at::Tensor&, const at::Tensor&)>("write_rows")
             .call(w, rows);
       }}};
}

// args: stage, case, "own" or "same" rows, and where it is found: "backward",
// the second one, "step" (written before it) or "save". What that returns.
TESSERA_RANK_FUNCTION(WritePlaces) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const PlacedWrite write =
      PlacedWriteCases()[static_cast<size_t>(std::stoi(words[1]))];
  auto model = std::make_shared<Table>();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Create(model, world.communicator(), std::stoi(words[0])));
  const at::Tensor rows =
      torch::tensor({3, 7}) + (words[2] == "own" ? 10 * world.rank() : 0);
  const auto forward = [&] {
    const at::Tensor h = model->first(torch::ones({1, 4}));
    return (h * model->rows(rows)).sum();
  };
  const auto write_now = [&] {
    return CatchTorch("write", [&] {
      torch::NoGradGuard no_grad;
      write.write(model->rows->weight, rows);
    });
  };
  const std::string& where = words[3];
  TESSERA_RETURN_IF_ERROR(engine->Backward(forward()));
  if (where == "step") TESSERA_RETURN_IF_ERROR(write_now());
  TESSERA_RETURN_IF_ERROR(engine->Step());
  if (where != "step") TESSERA_RETURN_IF_ERROR(write_now());
  std::string result;
  if (where == "save") {
    result = engine->FullStateDict().status().ToString();
  } else {
    result = engine->Backward(forward()).ToString();
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return result;
}

TEST(OperatorWritesTest, WhatRanksWriteAtPlacesOfTheirOwnIsNamed) {
  const std::vector<PlacedWrite> cases = PlacedWriteCases();
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto words = [&](int stage, const char* more) {
      return absl::StrCat(stage, " ", i, " ", more);
    };
    for (int stage = 0; stage <= 3; ++stage) {
      // Not every case runs at every stage.
      if (i > 1 && stage != static_cast<int>(i % 4)) continue;
      EXPECT_THAT(
          RunOnRanks(2, "WritePlaces", words(stage, "own backward")),
          Each(AllOf(HasSubstr(absl::StrCat(
                         "parameter 'rows.weight' was written by ",
                         cases[i].name, " at places that depend on its input")),
                     HasSubstr("FAILED_PRECONDITION: Backward: ["),
                     HasSubstr("between rank 0 and rank 1"))))
          << stage;
      EXPECT_THAT(RunOnRanks(2, "WritePlaces", words(stage, "same backward")),
                  Each("OK"))
          << cases[i].name << " " << stage;
    }
  }
  EXPECT_THAT(RunOnRanks(1, "WritePlaces", "3 0 own backward"), Each("OK"));
}

TEST(OperatorWritesTest, SuchWritesAreFoundAfterAStepAndBeforeASave) {
  const std::string written = "was written by aten::index_put_";
  for (const char* stage : {"0", "2", "3"}) {
    EXPECT_THAT(
        RunOnRanks(2, "WritePlaces", absl::StrCat(stage, " 1 own step")),
        Each(HasSubstr(written)))
        << stage;
    EXPECT_THAT(
        RunOnRanks(2, "WritePlaces", absl::StrCat(stage, " 1 own save")),
        Each(AllOf(HasSubstr("before saving: ["), HasSubstr(written))))
        << stage;
    EXPECT_THAT(
        RunOnRanks(2, "WritePlaces", absl::StrCat(stage, " 1 same save")),
        Each("OK"));
  }
}

// Rows that are within the norm are not changed, whichever they are.
TESSERA_RANK_FUNCTION(RenormalisesNothing) {
  auto model = std::make_shared<Table>();
  TESSERA_ASSIGN_OR_RETURN(auto engine, Create(model, world.communicator(),
                                               /*stage=*/2));
  const at::Tensor loss =
      torch::nn::functional::embedding(
          torch::tensor({3, 7}) + 10 * world.rank(), model->rows->weight,
          torch::nn::functional::EmbeddingFuncOptions().max_norm(100))
          .sum();
  TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
  TESSERA_RETURN_IF_ERROR(engine->Step());
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return "OK";
}

TEST(OperatorWritesTest, PlacesThatAreNotChangedMayDiffer) {
  EXPECT_THAT(RunOnRanks(2, "RenormalisesNothing", ""), Each("OK"));
}

// Rank 0 writes rows, and then back what was there, or the other half of what
// rank 1 writes at once; a look at masters in between is a border. args: "back"
// or "halves".
TESSERA_RANK_FUNCTION(WritesInTwoParts) {
  std::string results;
  for (const int stage : {0, 3}) {
    auto model = std::make_shared<Table>();
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             Create(model, world.communicator(), stage));
    at::Tensor& w = model->rows->weight;
    const at::Tensor rows = torch::tensor({3, 7});
    {
      torch::NoGradGuard no_grad;
      const at::Tensor were = w.index({rows});
      const bool mine = world.rank() == 0, halves = args == "halves";
      if (mine) w.index_put_({halves ? rows.slice(0, 0, 1) : rows}, 2);
      TESSERA_RETURN_IF_ERROR(engine->Master("rows.weight").status());
      if (halves) w.index_put_({mine ? rows.slice(0, 1) : rows}, 2);
      if (mine && !halves) w.index_put_({rows}, were);
    }
    const at::Tensor h = model->first(torch::ones({1, 4}));
    TESSERA_RETURN_IF_ERROR(engine->Backward((h * model->rows(rows)).sum()));
    TESSERA_RETURN_IF_ERROR(engine->Close());
    results += "OK ";
  }
  return results;
}

TEST(OperatorWritesTest, WhatIsThereAtLastIsCompared) {
  for (const char* how : {"back", "halves"}) {
    EXPECT_THAT(RunOnRanks(2, "WritesInTwoParts", how), Each("OK OK ")) << how;
  }
}

// Rank 0 alone writes in a scope of Engine::Summon, and all ranks get it.
TESSERA_RANK_FUNCTION(SummonedRows) {
  std::string results;
  for (const int stage : {0, 2, 3}) {
    auto model = std::make_shared<Table>();
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             Create(model, world.communicator(), stage));
    SummonOptions options;
    options.rank0_only = true;
    TESSERA_ASSIGN_OR_RETURN(auto scope,
                             engine->Summon({model->rows->weight}, options));
    if (world.rank() == 0) {
      torch::NoGradGuard no_grad;
      model->rows->weight.index_put_({torch::tensor({1})}, 2);
    }
    TESSERA_RETURN_IF_ERROR(scope.Close());
    TESSERA_RETURN_IF_ERROR(engine->FullStateDict().status());
    // Parameters that the others get by a copy are identical, too.
    torch::NoGradGuard no_grad;
    if (world.rank() == 0) {
      model->rows->weight.index_put_({torch::tensor({7})}, 3);
    } else {
      at::Tensor copy = model->rows->weight.clone();
      copy.index_put_({torch::tensor({7})}, 3);
      model->rows->weight.copy_(copy);
    }
    torch::AutoGradMode grad(true);
    const at::Tensor loss =
        (model->first(torch::ones({1, 4})) * model->rows(torch::tensor({1})))
            .sum();
    absl::StrAppend(&results, engine->Backward(loss).ToString(), " ");
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  return results;
}

TEST(OperatorWritesTest, WhatRank0WritesForAllIsTheSame) {
  EXPECT_THAT(RunOnRanks(2, "SummonedRows", ""), Each("OK OK OK "));
}

}  // namespace
}  // namespace tessera
