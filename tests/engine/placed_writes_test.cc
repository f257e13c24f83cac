// Tests of operators that write at places that depend on their input: where
// ranks write different values, the parameter is named.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/engine/operator_writes_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

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
