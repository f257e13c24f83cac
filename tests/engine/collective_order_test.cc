// Tests the order of collectives at stage 3, between what the model does: a
// model of three blocks, two ranks, one line per event.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/models/recomputed.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kDim = 64;  // a block is kDim * kDim elements, without gaps

// A linear layer that notes when it runs, forward and backward.
struct NotingBlockImpl : torch::nn::Module {
  NotingBlockImpl() {
    weight = register_parameter("weight", 0.1 * torch::randn({kDim, kDim}));
  }
  at::Tensor forward(const at::Tensor& x, int i, FakeCommunicator* notes) {
    notes->Note(absl::StrCat("forward ", i));
    const at::Tensor h = torch::linear(torch::tanh(x), weight);
    if (h.requires_grad()) {
      h.register_hook([i, notes](const at::Tensor&) {
        notes->Note(absl::StrCat("backward ", i));
      });
    }
    return h;
  }
  at::Tensor weight;
};
TORCH_MODULE(NotingBlock);

class NotingModel : public TestModel {
 public:
  // With `recompute` the second block is used in a reentrant checkpoint, too,
  // before the others.
  NotingModel(FakeCommunicator* notes, bool recompute)
      : notes_(notes), recompute_(recompute) {
    for (int i = 0; i < 3; ++i) blocks_->push_back(NotingBlock());
    register_module("blocks", blocks_);
  }
  at::Tensor Loss(int rank, int64_t micro_batch) override {
    // The input has a gradient, so backward uses the first block's weight.
    at::Tensor x = torch::full(
        {2, kDim}, 0.1 * (rank + 1) + static_cast<double>(micro_batch),
        torch::requires_grad());
    if (recompute_) {
      x = Recomputed::apply(x, Recomputed::Segment([this](const at::Tensor& h) {
                              return Block(1, h);
                            }));
    }
    return Forward(x).square().mean();
  }
  at::Tensor Forward(at::Tensor h) {
    for (int i = 0; i < 3; ++i) h = Block(i, h);
    return h;
  }

 private:
  at::Tensor Block(int i, const at::Tensor& h) {
    return blocks_->ptr<NotingBlockImpl>(static_cast<size_t>(i))
        ->forward(h, i, notes_);
  }

  FakeCommunicator* notes_;
  const bool recompute_;
  torch::nn::ModuleList blocks_;
};

// Returns "gather 1", "reduce 2" or "agree".
std::string Short(const FakeCommunicator::Call& call) {
  std::string text = absl::StrReplaceAll(
      call.what, {{"all-gather of unit blocks.", "gather "},
                  {"reduction of the gradients of unit blocks.", "reduce "},
                  {"agreement at the end of backward", "agree"}});
  if (call.operation == "reduce-scatter" || call.operation == "all-gather" ||
      call.operation == "exchange" || call.operation.empty()) {
    return text;
  }
  return absl::StrCat(call.operation, ": ", text);
}

// Returns the collectives of each of spec.steps steps, a line each. `args` is
// the spec, and before it "evaluate " for a forward without gradients before
// every other step, "lists " for prefetch lists, or "recompute " for a
// checkpoint.
TESSERA_RANK_FUNCTION(Trace) {
  const bool evaluate = absl::ConsumePrefix(&args, "evaluate ");
  const bool lists = absl::ConsumePrefix(&args, "lists ");
  const bool recompute = absl::ConsumePrefix(&args, "recompute ");
  const TrainingSpec spec = TrainingSpec::FromText(args);
  auto comm = std::make_shared<FakeCommunicator>(world.communicator());
  torch::manual_seed(1);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(std::make_shared<NotingModel>(comm.get(), recompute),
                    ConfigOf(spec), comm));
  if (lists) {
    TESSERA_RETURN_IF_ERROR(t.engine->SetPrefetch(
        "blocks.0", Engine::Pass::kForward, {"blocks.2", "blocks.1"}));
    TESSERA_RETURN_IF_ERROR(
        t.engine->SetPrefetch("blocks.1", Engine::Pass::kForward, {}));
    TESSERA_RETURN_IF_ERROR(t.engine->SetPrefetch(
        "blocks.2", Engine::Pass::kBackward, {"blocks.0"}));
  }
  comm->Take();
  std::vector<std::string> steps;
  for (int step = 0; step < spec.steps; ++step) {
    if (evaluate && step % 2 == 1) {
      torch::NoGradGuard no_grad;
      comm->Note("evaluate");
      dynamic_cast<NotingModel&>(*t.model).Forward(torch::ones({2, kDim}));
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    std::vector<std::string> events;
    for (const auto& call : comm->Take()) events.push_back(Short(call));
    steps.push_back(absl::StrJoin(events, ", "));
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrJoin(steps, "\n");
}

class CollectiveOrderTest : public ::testing::Test {
 protected:
  CollectiveOrderTest() {
    spec_.stage = 3;
    spec_.steps = 4;
    spec_.max_reuse_distance = 0;
    spec_.prefetch_bucket_size = 0;
    spec_.reduce_bucket_size = 1;
  }
  // Returns each step's collectives, which must be the same on both ranks.
  // `more` goes before the spec.
  std::vector<std::string> Steps(absl::string_view more = "") {
    const std::vector<std::string> answers =
        RunOnRanks(2, "Trace", absl::StrCat(more, spec_.ToText()));
    EXPECT_EQ(answers[0], answers[1]);
    return absl::StrSplit(answers[0], '\n');
  }
  // The first step is not yet recorded, those after it are.
  void ExpectSteps(const std::string& first, const std::string& then,
                   absl::string_view more = "") {
    EXPECT_THAT(Steps(more), ElementsAre(first, then, then, then));
  }
  TrainingSpec spec_;
};

// Each unit is gathered when it is used, and freed when the next one is. The
// last block is still whole when backward begins.
constexpr char kOneByOne[] =
    "forward 0, gather 0, forward 1, gather 1, forward 2, gather 2, "
    "backward 2, reduce 2, backward 1, gather 1, reduce 1, "
    "backward 0, gather 0, reduce 0, agree";

TEST_F(CollectiveOrderTest, WithoutPrefetch) {
  ExpectSteps(kOneByOne, kOneByOne);
}

TEST_F(CollectiveOrderTest, WithoutOverlapNothingIsGatheredAhead) {
  spec_.overlap = false;
  spec_.prefetch_bucket_size = 3 * kDim * kDim;
  ExpectSteps(kOneByOne, kOneByOne);
}

// Behind the gather that is waited for, before the block that needs it runs.
TEST_F(CollectiveOrderTest, OneUnitAhead) {
  spec_.prefetch_bucket_size = kDim * kDim;
  ExpectSteps(kOneByOne,
              "forward 0, gather 0, gather 1, forward 1, gather 2, forward 2, "
              "backward 2, reduce 2, backward 1, gather 0, reduce 1, "
              "backward 0, reduce 0, agree");
}

// A unit that would be gathered ahead at once is not freed before.
TEST_F(CollectiveOrderTest, AllUnitsAhead) {
  spec_.prefetch_bucket_size = 6 * kDim * kDim;
  ExpectSteps(kOneByOne,
              "forward 0, gather 0, gather 1, gather 2, forward 1, forward 2, "
              "backward 2, reduce 2, backward 1, reduce 1, "
              "backward 0, reduce 0, agree");
}

// Block 1 stays from its forward to its backward.
constexpr char kOneKept[] =
    "forward 0, gather 0, forward 1, gather 1, forward 2, gather 2, "
    "backward 2, reduce 2, backward 1, reduce 1, "
    "backward 0, gather 0, reduce 0, agree";

constexpr char kGatheredOnce[] =
    "forward 0, gather 0, forward 1, gather 1, forward 2, gather 2, "
    "backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, agree";

TEST_F(CollectiveOrderTest, UnitsThatAreReusedSoonStayWhole) {
  spec_.max_reuse_distance = 1000 * kDim * kDim;
  ExpectSteps(kGatheredOnce, kGatheredOnce);
}

// Between block 1's uses are the two of block 2.
TEST_F(CollectiveOrderTest, WhatIsUsedBeforeTheReuseCounts) {
  spec_.max_reuse_distance = 2 * kDim * kDim;
  EXPECT_EQ(Steps().back(), kOneByOne);
  spec_.max_reuse_distance = 2 * kDim * kDim + 1;
  EXPECT_EQ(Steps().back(), kOneKept);
  spec_.max_reuse_distance = 4 * kDim * kDim;
  EXPECT_EQ(Steps().back(), kOneKept);
  spec_.max_reuse_distance = 4 * kDim * kDim + 1;
  EXPECT_EQ(Steps().back(), kGatheredOnce);
}

// Units that are kept for later make room for the next one.
TEST_F(CollectiveOrderTest, NoFurtherAheadThanMayBeWhole) {
  spec_.prefetch_bucket_size = 6 * kDim * kDim;
  spec_.max_reuse_distance = 1000 * kDim * kDim;
  spec_.max_live_parameters = 2 * kDim * kDim;
  ExpectSteps(kOneKept,
              "forward 0, gather 0, gather 1, forward 1, gather 2, forward 2, "
              "backward 2, reduce 2, backward 1, gather 0, reduce 1, "
              "backward 0, reduce 0, agree");
}

TEST_F(CollectiveOrderTest, ReshardAfterForwardFalseKeepsUnitsForBackward) {
  spec_.reshard = "false";
  ExpectSteps(kGatheredOnce, kGatheredOnce);
}

// The lists' order applies from the first step on.
TEST_F(CollectiveOrderTest, ExplicitListsGoBeforeTheRecord) {
  const std::string with_lists =
      "forward 0, gather 0, gather 2, gather 1, forward 1, forward 2, "
      "backward 2, gather 0, reduce 2, backward 1, gather 1, reduce 1, "
      "backward 0, reduce 0, agree";
  ExpectSteps(with_lists, with_lists, "lists ");
}

// An evaluation before every other step is gathered ahead as well, and the
// steps after it are as ever; but what was used without gradients since the
// last step is reduced at the end of backward.
// All of a block's gradient goes at once, when a checkpoint may have brought
// the last part of it.
TEST_F(CollectiveOrderTest, CheckpointOfABlockThatIsUsedOutsideOfItToo) {
  spec_.steps = 2;
  spec_.max_reuse_distance = 1 << 30;
  EXPECT_EQ(Steps("recompute ")[1],
            "forward 1, gather 1, forward 0, gather 0, forward 1, forward 2, "
            "gather 2, backward 2, reduce 2, backward 1, backward 0, "
            "forward 1, backward 1, reduce 1, reduce 0, agree");
}

TEST_F(CollectiveOrderTest, EvaluationsBetweenSteps) {
  spec_.steps = 5;
  spec_.prefetch_bucket_size = 6 * kDim * kDim;
  const std::string step =
      "forward 0, gather 0, gather 1, gather 2, forward 1, forward 2, "
      "backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, agree";
  const std::string with_evaluation =
      "evaluate, forward 0, gather 0, gather 1, gather 2, forward 1, "
      "forward 2, forward 0, forward 1, forward 2, "
      "backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, agree";
  EXPECT_THAT(Steps("evaluate "), ElementsAre(kOneByOne, with_evaluation, step,
                                              with_evaluation, step));
}

}  // namespace
}  // namespace tessera
