// What of a region is kept, segments of a chain of modules, and errors: each
// says what differs, in which region and operator.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/group/self_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/checkpointed_sequential.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- kept operators

// Attention and a network, with dropout and a write into a product.
struct LayerImpl : nn::Module {
  LayerImpl() {
    in = register_module("in", nn::Linear(8, 24));
    out = register_module("out", nn::Linear(8, 8));
    conv = register_module("conv", nn::Conv1d(4, 4, 3));
  }
  Tensor forward(const Tensor& x) {
    const auto qkv = in(x).view({2, 4, 3, 2, 4}).permute({2, 0, 3, 1, 4});
    const Tensor a = torch::scaled_dot_product_attention(
        qkv[0], qkv[1], qkv[2], std::nullopt, 0.0, true);
    Tensor y = out(a.transpose(1, 2).reshape({2, 4, 8}));
    y.relu_();
    y = torch::dropout(conv(y), 0.3, true);
    return torch::bmm(y, y.transpose(1, 2)).exp() * torch::rand({4, 4});
  }
  nn::Linear in{nullptr}, out{nullptr};
  nn::Conv1d conv{nullptr};
};
TORCH_MODULE(Layer);

struct LayerRun {
  Values values;
  int convolutions = 0, dropouts = 0;  // again, by operators within
};
LayerRun RunLayer(const Caller& call) {
  torch::manual_seed(2);
  Layer layer;
  const Tensor x = torch::randn({2, 4, 8}).requires_grad_(true);
  LayerRun run;
  const Tensor y =
      call([&](const Tensor& t) { return layer->forward(t); }, x.exp());
  {
    OperatorCounts counts;
    y.sum().backward();
    run.convolutions = counts.of("aten::_convolution");
    run.dropouts = counts.of("aten::bernoulli_");
  }
  run.values = {y, x.grad(), torch::rand({2})};
  for (const Tensor& p : layer->parameters()) run.values.push_back(p.grad());
  return run;
}

Caller With(const CheckpointOptions& options) {
  return [options](const Unary& f, const Tensor& x) {
    return Checkpointed(options, f, x);
  };
}

TEST(KeptOperatorsTest, MatmulsAreNotRunAgain) {
  CheckpointOptions options;
  options.check = CheckpointOptions::Check::kAlways;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  const LayerRun plain = RunLayer(Plainly), full = RunLayer(AsRegion),
                 kept = RunLayer(With(options));
  ExpectSame(plain.values, full.values);
  ExpectSame(plain.values, kept.values);
  EXPECT_EQ(plain.convolutions, 0);
  EXPECT_EQ(full.convolutions, 1);
  EXPECT_EQ(kept.convolutions, 0);
  EXPECT_EQ(kept.dropouts, 1);
}

// What was kept is changed where nobody sees it, and backward takes it as it is
// then: it was not computed again.
TEST(KeptOperatorsTest, ResultsAreThoseOfForward) {
  const Tensor w = torch::randn({1, 4, 4}).requires_grad_(true);
  const Unary functions[] = {
      [&](const Tensor& x) { return torch::mm(x[0], w[0]); },
      [&](const Tensor& x) { return torch::addmm(w[0], x[0], w[0]); },
      [&](const Tensor& x) { return torch::bmm(x, w); },
      [&](const Tensor& x) { return torch::baddbmm(w, x, w); },
      [&](const Tensor& x) { return torch::linear(x, w[0]); },
      [&](const Tensor& x) {
        return torch::conv1d(x, w.view({4, 4, 1}));
      },
      [&](const Tensor& x) {
        const Tensor q = x.view({1, 1, 4, 4});
        return torch::scaled_dot_product_attention(q, q, w.view({1, 1, 4, 4}));
      }};
  for (const Unary& f : functions) {
    for (auto policy : {CheckpointOptions::Policy::kFull,
                        CheckpointOptions::Policy::kKeepMatmuls}) {
      CheckpointOptions options;
      options.policy = policy;
      options.check = CheckpointOptions::Check::kNever;
      const Tensor x = torch::randn({1, 4, 4}).requires_grad_(true);
      Tensor product;
      const Tensor y = Checkpointed(
          options,
          [&](const Tensor& t) {
            const Tensor result = f(t);
            if (!product.defined()) product = result.detach();
            return result.sin();
          },
          x);
      const Tensor slope = torch::autograd::grad({y.sum()}, {w}, {}, true)[0];
      std::memset(product.data_ptr(), 0, product.nbytes());
      EXPECT_EQ(torch::equal(slope, torch::autograd::grad({y.sum()}, {w})[0]),
                policy == CheckpointOptions::Policy::kFull);
    }
  }
}

TEST(KeptOperatorsTest, WhatThePredicateNamesAndRandomOnes) {
  CheckpointOptions options;
  options.check = CheckpointOptions::Check::kAlways;
  options.keep = [](absl::string_view name) {
    return name == "aten::rand" || name == "aten::exp" ||
           name == "aten::native_dropout";
  };
  const LayerRun plain = RunLayer(Plainly), kept = RunLayer(With(options));
  ExpectSame(plain.values, kept.values);
  EXPECT_EQ(kept.convolutions, 1);
}

TEST(KeptOperatorsTest, WithinRegionsAndUnderRetainedGraphs) {
  CheckpointOptions options;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  for (bool inner : {true, false}) {
    const auto run = [&](bool regions) {
      torch::manual_seed(2);
      Layer layer;
      const Tensor x = torch::randn({2, 4, 8}).requires_grad_(true);
      const Unary f = [&](const Tensor& t) { return layer->forward(t); };
      const Unary g = [&](const Tensor& t) {
        return regions ? Checkpointed(inner ? options : CheckpointOptions(), f,
                                      t.exp())
                       : f(t.exp());
      };
      const Tensor y =
          regions ? Checkpointed(inner ? CheckpointOptions() : options, g, x)
                  : g(x);
      const auto grad = [&](bool more) {
        return torch::autograd::grad({y.sum()}, {x}, {}, more)[0];
      };
      return Values{y, grad(true), grad(true), grad(false)};
    };
    ExpectSame(run(false), run(true));
  }
}

TEST(KeptOperatorsTest, RandomOnesLeaveTheGeneratorAsTheyDid) {
  CheckpointOptions options;
  options.keep = [](absl::string_view name) { return name == "aten::rand"; };
  const auto run = [](const Caller& call) {
    torch::manual_seed(2);
    const Tensor x = torch::linspace(-1, 1, 9).requires_grad_();
    const Tensor y = call(
        [](const Tensor& t) {
          return torch::dropout((t * torch::rand({9})).exp(), 0.5, true).sin();
        },
        x);
    y.sum().backward();
    return Values{y, x.grad(), torch::rand({1})};
  };
  ExpectSame(run(Plainly), run(With(options)));
}

TEST(KeptOperatorsTest, ThatThrowCountToo) {
  CheckpointOptions options;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  const auto run = [](const Caller& call) {
    const Tensor x = torch::linspace(-1, 1, 9).view({3, 3}).requires_grad_();
    const Tensor y = call(
        [](const Tensor& t) {
          try {
            return torch::mm(t, t.narrow(0, 0, 2));
          } catch (const c10::Error&) {
            return torch::mm(t.exp(), t).sin();
          }
        },
        x);
    y.sum().backward();
    return Values{y, x.grad()};
  };
  ExpectSame(run(Plainly), run(With(options)));
}

TEST(KeptOperatorsTest, WithinARegionHoldNothing) {
  HeldBytes held;
  CheckpointOptions options;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  const Tensor w = torch::ones({256, 256}, torch::requires_grad());
  const Unary f = [&](const Tensor& t) { return torch::mm(t, w).exp().sum(); };
  const auto hold = [&](const Unary& g) {
    const Tensor x = torch::ones({256, 256}, torch::requires_grad());
    const int64_t before = HeldBytes::get();
    Tensor y = g(x);
    const int64_t kept = HeldBytes::get() - before;
    y.backward();
    return kept;
  };
  const int64_t product = 256 * 256 * 4;
  EXPECT_GE(hold([&](const Tensor& x) { return Checkpointed(options, f, x); }),
            product);
  EXPECT_LT(hold([&](const Tensor& x) {
              return Checkpointed(
                  [&](const Tensor& t) { return Checkpointed(options, f, t); },
                  x);
            }),
            product / 4);
}

// ---- segments

struct CountedImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    ++runs;
    return linear(x).tanh();
  }
  nn::Linear linear = register_module("linear", nn::Linear(4, 4));
  int runs = 0;
};
TORCH_MODULE(Counted);

TEST(CheckpointedSequentialTest, RunsEachSegmentButTheLastAgain) {
  const auto run = [](int segments, const SequentialOptions& options) {
    torch::manual_seed(1);
    nn::Sequential chain;
    std::vector<Counted> modules;
    for (int i = 0; i < 5; ++i) {
      modules.emplace_back();
      chain->push_back(modules.back());
    }
    const Tensor x = torch::randn({3, 4}).requires_grad_(true);
    const Tensor y = segments == 0
                         ? chain->forward(x)
                         : CheckpointedSequential(chain, segments, x, options);
    y.sum().backward();
    Values values{y, x.grad()};
    std::string runs;
    for (auto& module : modules) {
      runs += std::to_string(module->runs);
      values.push_back(module->linear->weight.grad());
    }
    return std::make_pair(values, runs);
  };
  const Values plain = run(0, {}).first;
  SequentialOptions every, all;
  every.every = 2;
  all.keep_last = false;
  const struct {
    int segments;
    SequentialOptions options;
    std::string runs;
  } cases[] = {{1, {}, "11111"},
               {2, {}, "22111"},
               {5, {}, "22221"},
               {5, every, "21211"},
               {5, all, "22222"}};
  for (const auto& c : cases) {
    const auto [values, runs] = run(c.segments, c.options);
    ExpectSame(plain, values);
    EXPECT_EQ(runs, c.runs) << c.segments;
  }
  EXPECT_THAT(ErrorOf([&] { run(6, {}); }),
              HasSubstr("expected segments in 1..5 and every >= 1, got 6"));
}

TEST(OptionsTest, WhatCostsNothingHere) {
  CheckpointOptions options;
  options.keep_on_cpu = true;
  options.partition_over = MakeSelfCommunicator();
  ExpectSame(RunLayer(Plainly).values, RunLayer(With(options)).values);
}

}  // namespace
}  // namespace tessera
