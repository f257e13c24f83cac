// Modules that know nothing of it are computed again in backward: what is held
// between forward and backward, what runs again, and the bits, against the same
// module that keeps its activations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "comm/group/self_communicator.h"
#include "tests/recompute/recomputed_util.h"

namespace tessera {
namespace {

TEST_F(RecomputedUnitsTest, GivesTheSameBitsAndHoldsTheInputsAlone) {
  std::vector<std::vector<Tensor>> states;
  std::vector<int64_t> held;
  for (const char* policy : {"", "full", "selective"}) {
    Trained run(policy);
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    held.push_back(run.held[2]);
    const RecomputeReport& report = run.engine->last_step().recompute;
    EXPECT_THAT(report.unable, IsEmpty());
    EXPECT_EQ(report.given_up, *policy == 0 ? 0 : kBlocks) << policy;
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
  ExpectSameTensors(states[0], states[2]);
  // A block's input and `calls`, no more: those of the four blocks of 17 times
  // the size of an input.
  const int64_t input = kTokens * kDim * 4;
  EXPECT_GT(held[0], kBlocks * 10 * input);
  EXPECT_LT(held[1], (kBlocks + 1) * input + 4096);
  EXPECT_LT(held[2], held[0]);
  EXPECT_GT(held[2], held[1]);
}

TEST_F(RecomputedUnitsTest, GivesTheSameBitsAtEachStage) {
  for (int stage : {0, 1, 2}) {
    ExpectSameTraining([](Trained&) {}, "full", stage);
  }
}

// ---- how it is used

TEST_F(RecomputedUnitsTest, UnpacksTwice) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.Create();
    run.Forward(Input(0));
    BackwardOptions again;
    again.retain_graph = true;
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss, again));
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
    TESSERA_ASSERT_OK(run.engine->Step());
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
}

// What a backward over a graph that stays has computed again goes with it, what
// it did not ask for, too.
TEST_F(RecomputedUnitsTest, RetainedGraphsLeaveNothingBehind) {
  Trained run("full");
  std::vector<Tensor> unused;  // of the graph, not of the loss
  SetMiddle(run, [&](const Tensor& h) {
    unused.push_back(h.sigmoid().sum());
    return h * 1;
  });
  run.Create();
  BackwardOptions again;
  again.more_losses = again.retain_graph = true;
  const int64_t activation = kTokens * 4 * kDim * 4;
  std::vector<int64_t> held;
  for (int step = 0; step < 4; ++step) {
    run.Forward(Input(step));
    const int64_t before = HeldBytes::get();
    for (int i = 0; i < 3; ++i) {
      TESSERA_ASSERT_OK(run.engine->Backward(run.loss, again));
      // But gradients.
      EXPECT_LT(HeldBytes::get() - before, activation) << i;
    }
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
    TESSERA_ASSERT_OK(run.engine->Step());
    run.loss = Tensor();
    unused.clear();
    held.push_back(HeldBytes::get());
  }
  EXPECT_EQ(held[3], held[1]);
}

// libtorch calls nothing at the end of a graph task that failed.
TEST_F(RecomputedUnitsTest, FailedBackwardsLeaveNothingBehind) {
  Trained run("full");
  bool fails = false;
  SetMiddle(run, [&](const Tensor& h) {
    Tensor out = h * 1;
    if (out.requires_grad()) {
      out.register_hook([&](const Tensor& gradient) {
        if (fails) throw std::runtime_error("the hook's");
        return gradient;
      });
    }
    return out;
  });
  for (int step = 0; step < 2; ++step) run.Step(Input(step));
  run.Forward(Input(2));
  const int64_t before = HeldBytes::get();
  fails = true;
  BackwardOptions again;
  again.retain_graph = true;
  const absl::Status failed = run.engine->Backward(run.loss, again);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("the hook's"));
  // Half of the activations of a block.
  EXPECT_LT(HeldBytes::get() - before, kTokens * 4 * kDim * 4 / 2);
  fails = false;
  TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
  TESSERA_ASSERT_OK(run.engine->Step());
}

TEST_F(RecomputedUnitsTest, DifferentiatesTwice) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.Create();
    Tensor x = Input(0).requires_grad_();
    run.Forward(x);
    const auto gradients =
        torch::autograd::grad({run.loss}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true);
    run.loss = run.loss + gradients[0].square().sum();
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
    TESSERA_ASSERT_OK(run.engine->Step());
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
}

TEST_F(RecomputedUnitsTest, EvaluatesBetween) {
  ExpectSameTraining([](Trained& run) {
    run.Create();
    run.Forward(Input(7));  // and no backward
    torch::NoGradGuard no_grad;
    run.net->eval();
    run.Forward(Input(8));
    run.net->train();
  });
}

TEST_F(RecomputedUnitsTest, HoldsNothingAfterwards) {
  Trained run("full");
  run.Step(Input(0));
  run.losses.clear();
  run.loss = Tensor();
  const int64_t before = HeldBytes::get();
  for (int i = 0; i < 5; ++i) {
    run.Step(Input(i));
    run.losses.clear();
    run.loss = Tensor();
    run.Forward(Input(i));  // dropped
    run.loss = Tensor();
  }
  TESSERA_ASSERT_OK(run.engine->ZeroGrad());
  EXPECT_EQ(HeldBytes::get(), before);
}

// What the last operator of a block makes is the next one's input, which is
// held.
TEST_F(RecomputedUnitsTest, RunsNoMoreThanIsNeeded) {
  Trained run("full");
  for (const auto& block : *run.net->blocks) {
    auto* const b = block->as<Block>();
    b->middle = [](const Tensor& h) {
      // The second is needed for the first's backward alone, which saves
      // nothing.
      return h + Call("recomputed_units_test::scaled_by_calls", h.detach());
    };
  }
  run.recompute()->set_check("never");
  drawn = 0;
  run.Step(Input(0));
  // `down` saves the sum.
  EXPECT_EQ(drawn, 2 * kBlocks);
  SetMiddle(run, nullptr);
  for (const auto& block : *run.net->blocks) {
    auto* const b = block->as<Block>();
    b->last = [](const Tensor& h) {
      return h + Call("recomputed_units_test::scaled_by_calls", h.detach());
    };
  }
  drawn = 0;
  run.Step(Input(1));
  EXPECT_EQ(drawn, kBlocks);
}

// A unit is whole for what is computed again and for its backward: gathered
// once for both.
TEST_F(RecomputedUnitsTest, GathersNoMore) {
  // A rank that is alone gathers nothing, unless there is to be a copy to
  // poison.
  SetPoisonOnFree(true);
  const absl::Cleanup restore = [] { SetPoisonOnFree(false); };
  std::vector<std::vector<std::string>> gathers;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.zero()->set_stage3_max_reuse_distance(0);
    run.zero()->set_stage3_prefetch_bucket_size(0);
    run.Step(Input(0));
    run.communicator->Take();
    run.Step(Input(1));
    gathers.emplace_back();
    for (const auto& call : run.communicator->Take()) {
      if (call.operation == "all-gather") gathers.back().push_back(call.what);
    }
  }
  EXPECT_GT(gathers[0].size(), static_cast<size_t>(2 * kBlocks - 1));
  EXPECT_EQ(gathers[0], gathers[1]);
}

// ---- what is chosen

TEST_F(RecomputedUnitsTest, TakesEachSecondModule) {
  Trained run("full");
  run.recompute()->set_every(2);
  run.Step(Input(0));
  EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks / 2);
}

TEST_F(RecomputedUnitsTest, TakesWhatRepeatsByItself) {
  Trained run("full");
  run.recompute()->clear_units();
  run.recompute()->add_units("auto");
  run.Step(Input(0));
  EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks);
}

TEST_F(RecomputedUnitsTest, KeepsSoManyBytes) {
  Trained all("full");
  all.Step(Input(0));
  const int64_t block =
      all.engine->last_step().recompute.given_up_bytes / kBlocks;
  Trained run("full");
  run.recompute()->set_budget_bytes(2 * block + block / 2);
  for (int i = 0; i < 2; ++i) {
    run.Step(Input(i));
    EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks - 2);
    EXPECT_EQ(run.engine->last_step().recompute.kept, 2);
  }
}

TEST_F(RecomputedUnitsTest, NamesAClassThatIsNotThere) {
  Trained run("full");
  run.recompute()->add_units("Blok");
  EXPECT_THAT(run.TryCreate().ToString(),
              AllOf(HasSubstr("activation_checkpointing.units"),
                    HasSubstr("Blok"), HasSubstr("Block")));
}

}  // namespace
}  // namespace tessera
