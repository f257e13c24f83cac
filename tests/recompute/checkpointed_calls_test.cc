// Regions of functions with inputs and outputs of every kind: what comes out is
// what comes out without the region, to the bit.
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

TEST(CheckpointedTest, ManyInputsAndOutputs) {
  struct Out {
    Tensor first, unused;
    std::vector<Tensor> rest;
  };
  const auto f = [](const Tensor& x, std::vector<Tensor> list, double factor,
                    std::optional<Tensor> mask,
                    const std::string& name) -> Out {
    EXPECT_EQ(name, "name");
    const Tensor y = (x * list[0]).exp() * factor;
    return {mask ? y * *mask : y, y.sin(), {list[1].pow(3), list[1] * y}};
  };
  const auto run = [&](bool region) {
    torch::manual_seed(1);
    const auto grad = [] { return torch::randn({4}).requires_grad_(true); };
    const Tensor x = grad(), p = grad(), q = grad(), mask = torch::rand({4});
    const std::vector<Tensor> list = {p, q.exp()};
    const Out out = region ? Checkpointed(f, x, list, 0.5,
                                          std::optional<Tensor>(mask), "name")
                           : f(x, list, 0.5, mask, "name");
    (out.first.sum() + out.rest[0].sum() + out.rest[1].square().sum())
        .backward();
    return Values{x.grad(), p.grad(), q.grad()};
  };
  ExpectSame(run(false), run(true));
}

TEST(CheckpointedTest, FunctionsOfNothingAndWithoutResult) {
  const auto run = [](bool region) {
    const Tensor w = torch::full({3}, 0.7, torch::requires_grad());
    Tensor out;
    const auto set = [&] { out = w.exp().sin(); };
    region ? Checkpointed(set) : set();
    out.sum().backward();
    return Values{w.grad()};
  };
  ExpectSame(run(false), run(true));
}

TEST(CheckpointedTest, InPlaceOnAnInput) {
  const auto run = [](const Caller& call) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({4, 3}).requires_grad_(true);
    const Tensor h = x * 2;
    const Tensor y = call(
        [](const Tensor& t) {
          t.mul_(t.detach().cos());
          const Tensor z = t.view({-1}).narrow(0, 3, 6).exp_();
          return t.sin() * z.sum();
        },
        h);
    y.sum().backward();
    return Values{y, h, x.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

// What a region captured and writes, with a gradient: a cache of keys.
TEST(CheckpointedTest, InPlaceOnWhatIsCaptured) {
  const auto run = [](const Caller& call) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({2, 3}).requires_grad_(true);
    Tensor cache = torch::zeros({4, 3});
    Values values;
    Tensor sum = torch::zeros({});
    for (int64_t i : {0, 1}) {
      sum = sum + call(
                      [cache, i](const Tensor& t) {
                        const Tensor before = t + cache.narrow(0, 0, 2).sin();
                        cache.narrow(0, 2 * i, 2).copy_(t.exp() + before);
                        return torch::mm(t, cache.t()).sin();
                      },
                      x * (i + 1.0))
                      .sum();
      cache = cache.detach().clone();
    }
    sum.backward();
    return Values{sum, cache, x.grad()};
  };
  ExpectSame(run(Plainly), run([](const Unary& f, const Tensor& x) {
               Unary copy = f;
               return Checkpointed(copy, x);
             }));
}

struct Cube : torch::autograd::Function<Cube> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    context->save_for_backward({x, x * x});
    return x * x * x;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto again = context->get_saved_variables();
    EXPECT_TRUE(SameBits(saved[1], again[1]));
    return {gradients[0] * 3 * saved[1] + 0 * again[0]};
  }
};

TEST(CheckpointedTest, AutogradFunctionsThatUnpackTwice) {
  const auto run = [](const Caller& call) {
    const Tensor x = torch::linspace(-1, 1, 5).requires_grad_(true);
    call([](const Tensor& t) { return Cube::apply(t.exp()).sin(); }, x)
        .sum()
        .backward();
    return Values{x.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

TEST(CheckpointedTest, GradientsWithinTheFunction) {
  const auto run = [](const Caller& call) {
    const Tensor x = torch::linspace(-1, 1, 5).requires_grad_(true);
    call(
        [](const Tensor& t) {
          const Tensor u = t * 1.5;
          const Tensor y = (u.exp() * u).sum();
          return torch::autograd::grad({y}, {u}, {}, true, true)[0].sin();
        },
        x.exp())
        .sum()
        .backward();
    return Values{x.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

}  // namespace
}  // namespace tessera
