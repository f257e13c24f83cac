// Regions under an engine, in one process: plain libtorch's bits without
// regions, what may not be done in one, and how often units are gathered.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "tests/dispatch/autocast_scope.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct BlockImpl : nn::Module {
  BlockImpl() {
    up = register_module("up", nn::Linear(8, 12));
    down = register_module("down", nn::Linear(12, 8));
  }
  Tensor forward(const Tensor& x) {
    return x + down(torch::dropout(torch::gelu(up(x)), 0.2, true));
  }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    norm = register_module("norm", nn::BatchNorm1d(8));
  }
  Tensor Forward(const Caller& call, const Tensor& x) {
    Tensor h = x;
    for (int i : {0, 1, 2, 1}) {
      h = call(
          [this, i](const Tensor& t) {
            return norm(
                blocks->ptr<BlockImpl>(static_cast<size_t>(i))->forward(t));
          },
          h);
    }
    return h;
  }
  nn::ModuleList blocks;
  nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

class CheckpointedEngineTest : public TaggedStorageTest,
                               public ::testing::WithParamInterface<int> {
 protected:
  // Trains both, the one of the engine with regions.
  void Train(const Caller& call,
             const std::function<std::shared_ptr<void>()>& scope = nullptr) {
    Twins<Net> t([] { return Net(); });
    TwinOptions options;
    options.stage = GetParam();
    options.accumulation = 2;
    t.Create(options);
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < 2; ++i) {
        const Tensor x = torch::randn({5, 8});
        const auto loss = [&](Net& net, const Caller& how) {
          torch::manual_seed(step);
          auto held = scope == nullptr ? nullptr : scope();
          return MeanSquare(net->Forward(how, x));
        };
        const Tensor expected =
            t.ForwardPlain([&](Net& net) { return loss(net, Plainly); });
        const Tensor got = loss(t.tagged, call);
        EXPECT_TRUE(SameBits(expected, got));
        TESSERA_EXPECT_OK(t.BackwardPlain(expected));
        TESSERA_EXPECT_OK(t.engine->Backward(got));
        t.ExpectFreed();
        if (i == 1) t.ExpectSameGradients();
        TESSERA_EXPECT_OK(t.engine->Step());
      }
      t.StepPlain();
      t.ExpectSameParameters();
    }
    const auto buffers = t.plain->named_buffers();
    for (const auto& buffer : t.tagged->named_buffers()) {
      EXPECT_TRUE(SameBits(buffers[buffer.key()], buffer.value()))
          << buffer.key();
    }
    EXPECT_EQ(t.comm->leaks(), 0);
  }
};

TEST_P(CheckpointedEngineTest, TrainsAsPlainLibtorchWithoutRegions) {
  Train(AsRegion);
}

TEST_P(CheckpointedEngineTest, Nested) {
  Train([](const Unary& f, const Tensor& x) {
    return Checkpointed([f](const Tensor& y) { return AsRegion(f, y); }, x);
  });
}

TEST_P(CheckpointedEngineTest, KeepingMatmuls) {
  CheckpointOptions options;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  Train([options](const Unary& f, const Tensor& x) {
    return Checkpointed(options, f, x);
  });
}

TEST_P(CheckpointedEngineTest, UnderAutocast) {
  for (bool cache : {true, false}) {
    Train(AsRegion, [cache] {
      return std::static_pointer_cast<void>(
          std::make_shared<LocalAutocast>(cache));
    });
  }
}

void ExpectNoPins(const Twins<Net>& t) {
  for (const auto& entry : t.tagged->named_parameters()) {
    EXPECT_EQ(Registry::Global().Find(entry.value()).flat->pins(), 0)
        << entry.key();
  }
}

// Two backwards over one graph in each step: both have plain libtorch's bits,
// no unit stays pinned after either, and the steps hold no more and more.
TEST_P(CheckpointedEngineTest, RetainedGraphsLeaveNothingBehind) {
  HeldBytes counted;
  Twins<Net> t([] { return Net(); });
  TwinOptions options;
  options.stage = GetParam();
  options.max_live = 100000;  // so units are pinned
  t.Create(options);
  BackwardOptions first;
  first.more_losses = first.retain_graph = true;
  std::vector<int64_t> held;
  for (int step = 0; step < 5; ++step) {
    const Tensor x = torch::randn({5, 8});
    {
      torch::manual_seed(step);
      const Tensor plain =
          t.ForwardPlain([&](Net& net) { return net->Forward(Plainly, x); });
      torch::manual_seed(step);
      const Tensor h = t.tagged->Forward(AsRegion, x);
      plain.abs().mean().backward({}, /*retain_graph=*/true);
      TESSERA_EXPECT_OK(t.engine->Backward(h.abs().mean(), first));
      ExpectNoPins(t);
      TESSERA_EXPECT_OK(t.BackwardPlain(MeanSquare(plain)));
      TESSERA_EXPECT_OK(t.engine->Backward(MeanSquare(h)));
      ExpectNoPins(t);
      t.ExpectSameGradients();
      TESSERA_EXPECT_OK(t.engine->Step());
      t.StepPlain();
      t.ExpectSameParameters();
    }
    held.push_back(HeldBytes::get());
  }
  EXPECT_EQ(held[4], held[2]);
}

INSTANTIATE_TEST_SUITE_P(Stages, CheckpointedEngineTest,
                         ::testing::Values(0, 3), [](const auto& info) {
                           return "Stage" + std::to_string(info.param);
                         });

class CheckpointedParametersTest : public TaggedStorageTest {};

TEST_F(CheckpointedParametersTest, AreInputsThatKeepNothing) {
  auto t = LinearTwins();
  t.Create();
  const Tensor x = torch::randn({3, 8});
  const auto loss = [&](nn::Linear& net, bool region) {
    const auto f = [&](const Tensor& w, const Tensor& b) {
      return torch::addmm(b, x, w.t()).exp();
    };
    return MeanSquare(region ? Checkpointed(f, net->weight, net->bias)
                             : f(net->weight, net->bias));
  };
  for (int step = 0; step < 2; ++step) {
    const Tensor expected =
        t.ForwardPlain([&](nn::Linear& net) { return loss(net, false); });
    const Tensor got = loss(t.tagged, true);
    EXPECT_TRUE(SameBits(expected, got));
    t.ExpectFreed();
    TESSERA_EXPECT_OK(t.BackwardPlain(expected));
    TESSERA_EXPECT_OK(t.engine->Backward(got));
    t.ExpectSameGradients();
    TESSERA_EXPECT_OK(t.engine->Step());
    t.StepPlain();
    t.ExpectSameParameters();
  }
}

TEST_F(CheckpointedParametersTest, MayNotBeWritten) {
  auto t = LinearTwins();
  t.Create();
  CheckpointOptions options;
  options.name = "clamp";
  const Tensor x = torch::randn({3, 8}, torch::requires_grad());
  EXPECT_THAT(ErrorOf([&] {
                Checkpointed(
                    options,
                    [&](const Tensor& y) {
                      {
                        torch::NoGradGuard no_grad;
                        t.tagged->weight.clamp_(-1, 1);
                      }
                      return t.tagged(y);
                    },
                    x);
              }),
              AllOf(HasSubstr("[clamp] operator aten::clamp_ writes parameter "
                              "'weight' in a checkpointed region"),
                    HasSubstr("write it before or after the region")));
}

TEST_F(CheckpointedParametersTest, ThatChangeBeforeBackwardAreNamed) {
  auto t = LinearTwins();
  t.Create();
  const auto region = [&] {
    return MeanSquare(
        AsRegion([&](const Tensor& y) { return t.tagged(y).exp(); },
                 torch::ones({3, 8})));
  };
  const Tensor kept = region();
  TESSERA_ASSERT_OK(t.engine->Backward(region()));
  TESSERA_ASSERT_OK(t.engine->Step());
  EXPECT_THAT(t.engine->Backward(kept),
              FailsWith(AllOf(HasSubstr("[checkpoint] parameter '"),
                              HasSubstr("was changed in place between forward "
                                        "and backward"))));
}

// Gathers of one backward, once what comes next is known.
int64_t GathersInBackward(const Caller& call, int64_t max_live) {
  Twins<Net> t([] { return Net(); });
  TwinOptions options;
  options.max_live = max_live;
  t.Create(options);
  int64_t gathers = 0;
  for (int step = 0; step < 4; ++step) {
    const Tensor x = torch::randn({5, 8});
    const Tensor loss = MeanSquare(t.tagged->Forward(call, x));
    const int64_t before = t.comm->gathers();
    TESSERA_EXPECT_OK(t.engine->Backward(loss));
    gathers = t.comm->gathers() - before;
    TESSERA_EXPECT_OK(t.engine->Step());
  }
  return gathers;
}

// Where a region's units fit the limit, together with the gaps in them.
TEST_F(CheckpointedParametersTest, AreGatheredOnceForBothRuns) {
  for (int64_t max_live : {500, 700, 100000}) {
    EXPECT_LE(GathersInBackward(AsRegion, max_live),
              GathersInBackward(Plainly, max_live))
        << max_live;
  }
}

}  // namespace
}  // namespace tessera
