// Regions in one process, without an engine: whatever the function does, what
// comes out is what comes out without the region, to the bit.
#include "sharding/recompute/checkpointed/checkpointed.h"

#include <torch/torch.h>

#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "tests/dispatch/autocast_scope.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

// A network that is called in one way or another, and all that there is to
// compare after some steps of plain SGD.
struct NetImpl : nn::Module {
  NetImpl() {
    a = register_module("a", nn::Linear(6, 10));
    norm = register_module("norm", nn::BatchNorm1d(10));
    dropout = register_module("dropout", nn::Dropout(0.3));
    b = register_module("b", nn::Linear(10, 6));
    calls = register_buffer("calls", torch::zeros({1}));
  }
  Tensor Block(const Tensor& x) {
    calls += 1;
    return b(dropout(torch::gelu(norm(a(x)))) * calls.clone()) + x;
  }
  nn::Linear a{nullptr}, b{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Dropout dropout{nullptr};
  Tensor calls;
};
TORCH_MODULE(Net);

// `scope` is alive during forward.
Values Train(const Caller& call, at::ScalarType dtype = at::kFloat,
             const std::function<std::shared_ptr<void>()>& scope = nullptr) {
  torch::manual_seed(3);
  Net net;
  net->to(dtype);
  const Unary block = [&](const Tensor& x) { return net->Block(x); };
  Values values;
  for (int step = 0; step < 3; ++step) {
    const Tensor x = torch::randn({5, 6}).to(dtype).requires_grad_(step != 1);
    Tensor loss;
    {
      auto held = scope == nullptr ? nullptr : scope();
      loss = MeanSquare(call(block, torch::tanh(call(block, x))));
    }
    const Tensor after = torch::rand({2});
    loss.backward();
    values.insert(values.end(), {loss, after, x.grad(), torch::rand({2})});
    torch::NoGradGuard no_grad;
    for (Tensor& p : net->parameters()) {
      values.push_back(p.grad().clone());
      p.sub_(p.grad(), 0.1);
      p.mutable_grad().reset();
    }
  }
  for (const Tensor& b : net->buffers()) values.push_back(b);
  return values;
}

TEST(CheckpointedTest, DropoutAndRunningStatisticsAndCounters) {
  ExpectSame(Train(Plainly), Train(AsRegion));
}

TEST(CheckpointedTest, Bfloat16) {
  ExpectSame(Train(Plainly, at::kBFloat16), Train(AsRegion, at::kBFloat16));
}

TEST(CheckpointedTest, AutocastWithAndWithoutItsCache) {
  for (bool cache : {true, false}) {
    const auto scope = [cache] {
      return std::static_pointer_cast<void>(
          std::make_shared<LocalAutocast>(cache));
    };
    ExpectSame(Train(Plainly, at::kFloat, scope),
               Train(AsRegion, at::kFloat, scope));
  }
}

TEST(CheckpointedTest, Nested) {
  const Caller nested = [](const Unary& f, const Tensor& x) {
    return Checkpointed(
        [f](const Tensor& y) {
          const Tensor z = Checkpointed(f, y.exp().sigmoid());
          return Checkpointed(f, z).sin();
        },
        x);
  };
  const Caller plain = [](const Unary& f, const Tensor& x) {
    return f(f(x.exp().sigmoid())).sin();
  };
  ExpectSame(Train(plain), Train(nested));
}

TEST(CheckpointedTest, WithoutGradientsTheFunctionIsCalled) {
  torch::NoGradGuard no_grad;
  const Tensor x = torch::ones({2}, torch::requires_grad());
  EXPECT_TRUE(SameBits(Checkpointed([](Tensor t) { return t * 2; }, x),
                       torch::full({2}, 2.0)));
}

// ---- operators of the user's

// Says nothing of what it writes, and writes nothing.
Tensor Twice(const Tensor& x) { return x * 2; }
// Says nothing of what it writes, and writes its second argument.
Tensor CountCalls(const Tensor& x, const Tensor& count) {
  *count.data_ptr<float>() += 1;
  return x * *count.data_ptr<float>();
}
// Says that it writes its second argument.
Tensor AddTo(const Tensor& x, const Tensor& sum) {
  sum.add_(x.detach().sum());
  return x * sum.clone();
}
TORCH_LIBRARY(checkpointed_test, m) {
  m.def("twice", &Twice);
  m.def("count_calls", &CountCalls);
  m.def("add_to(Tensor x, Tensor(a!) sum) -> Tensor", &AddTo);
}

template <typename... Args>
Tensor Call(const char* name, const Args&... args) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Args&...)>()
      .call(args...);
}

TEST(CheckpointedTest, OperatorsOfTheUsersThatWrite) {
  const auto run = [](const Caller& call) {
    Tensor count = torch::zeros({1}), sum = torch::zeros({1});
    const Tensor x = torch::linspace(-1, 2, 4).requires_grad_(true);
    const Tensor y = call(
        [&](const Tensor& t) {
          Tensor h = Call("checkpointed_test::count_calls", t, count).exp();
          h = Call("checkpointed_test::twice", h);
          h = Call("checkpointed_test::add_to", h, sum);
          return Call("checkpointed_test::count_calls", h, count).sin();
        },
        x);
    y.sum().backward();
    return Values{y, count, sum, x.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

TEST(CheckpointedTest, OperatorsOfTheUsersThatDoNotWriteHoldNothing) {
  HeldBytes held;
  const Tensor x = torch::ones({1 << 16}, torch::requires_grad());
  const Tensor h = x * 1;
  const int64_t before = HeldBytes::get();
  const Tensor y = AsRegion(
      [](const Tensor& t) {
        return Call("checkpointed_test::twice", t).exp().sum();
      },
      h);
  EXPECT_LT(HeldBytes::get() - before, 50000);
  y.backward();
}

// ---- backward

TEST(CheckpointedTest, RetainedGraphs) {
  const auto run = [](const Caller& call) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({4}).requires_grad_(true);
    const Tensor y =
        call([](const Tensor& t) { return torch::dropout(t, 0.5, true).exp(); },
             x.sin());
    Values values;
    for (int i = 0; i < 3; ++i) {
      values.push_back(
          torch::autograd::grad({(y * (i + 1)).sum()}, {x}, {}, i < 2)[0]);
    }
    return values;
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

TEST(CheckpointedTest, DoubleBackward) {
  const auto run = [](const Caller& call) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({3, 4}).requires_grad_(true);
    const Tensor w = torch::randn({4, 4}).requires_grad_(true);
    const Tensor y = call(
        [&w](const Tensor& t) {
          return torch::tanh(torch::mm(torch::dropout(t, 0.2, true), w)).exp();
        },
        x.sin());
    const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true,
                                               /*create_graph=*/true)[0];
    const auto second =
        torch::autograd::grad({slope.square().sum()}, {x, w}, {}, true, true);
    second[0].square().sum().backward();
    return Values{slope, second[0], second[1], x.grad(), w.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

TEST(CheckpointedTest, OnOtherThreads) {
  const Values expected = Train(Plainly);
  Values got;
  std::thread([&] {
    torch::manual_seed(3);
    const Tensor x = torch::ones({3}, torch::requires_grad());
    Tensor y;
    std::thread([&] {
      y = Checkpointed([](const Tensor& t) { return t.exp().sin(); }, x);
    }).join();
    y.sum().backward();
    EXPECT_TRUE(SameBits(x.grad(), x.detach().exp().cos() * x.detach().exp()));
    got = Train(AsRegion);
  }).join();
  ExpectSame(expected, got);
}

TEST(CheckpointedTest, TheLastOperatorsAreNotRunAgain) {
  const Tensor x = torch::ones({3}, torch::requires_grad());
  const Tensor y = Checkpointed(
      [](const Tensor& t) { return t.sqrt().tanh().neg().exp() + 1; }, x);
  OperatorCounts counts;
  y.sum().backward();
  EXPECT_EQ(counts.of("aten::sqrt"), 1);
  EXPECT_EQ(counts.of("aten::add"), 0);
}

TEST(CheckpointedTest, WhatNobodyNeedsIsNotRunAgain) {
  const Tensor x = torch::ones({3}, torch::requires_grad());
  auto [y, z] = Checkpointed(
      [](const Tensor& t) {
        const Tensor first = t.exp();
        return std::make_pair(first * 2, first.log2().tanh());
      },
      x);
  z.reset();
  OperatorCounts counts;
  y.sum().backward();
  EXPECT_EQ(counts.of("aten::exp"), 1);
  EXPECT_EQ(counts.of("aten::log2"), 0);
}

TEST(CheckpointedTest, HoldsNothingBetweenForwardAndBackward) {
  HeldBytes held;
  const int64_t n = 1 << 16, bytes = 4 * n;
  const auto hold = [&](const Caller& call) {
    const Tensor x = torch::ones({n}, torch::requires_grad());
    const int64_t before = HeldBytes::get();
    Tensor y = call(
        [](const Tensor& t) {
          return t.sin().cos().exp().sigmoid().tanh().sum();
        },
        x);
    const int64_t kept = HeldBytes::get() - before;
    y.backward();
    EXPECT_LT(HeldBytes::get() - before, bytes + 50000);  // the gradient
    return kept;
  };
  EXPECT_GE(hold(Plainly), 4 * bytes);
  EXPECT_LT(hold(AsRegion), 50000);
  // Of an inner region's input neither.
  EXPECT_LT(hold([](const Unary& f, const Tensor& x) {
              return Checkpointed(
                  [f](const Tensor& t) { return Checkpointed(f, t.exp()); }, x);
            }),
            50000);
}

TEST(CheckpointedTest, ABackwardLeavesNothingBehind) {
  HeldBytes held;
  const Tensor x = torch::ones({1 << 16}, torch::requires_grad());
  const Tensor w = torch::ones({1}, torch::requires_grad());
  const Tensor y = AsRegion(
      [&](const Tensor& t) { return (t.exp().sin() * w).tanh().sum(); }, x);
  const int64_t before = HeldBytes::get();
  // Not all that was computed again is asked for.
  torch::autograd::grad({y}, {w}, {}, /*retain_graph=*/true);
  EXPECT_LT(HeldBytes::get() - before, 50000);
}

}  // namespace
}  // namespace tessera
