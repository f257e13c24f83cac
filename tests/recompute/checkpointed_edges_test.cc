// What a region's function may do at the edges of what is followed: state of
// the thread and of modules that it changes and puts back, writes to products
// that are kept, tensors that it holds, operators that say nothing, inputs of
// any strides.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

CheckpointOptions ToTheEnd() {
  CheckpointOptions options;
  options.name = "block";
  options.stop_early = false;
  return options;
}

CheckpointOptions KeepingMatmuls() {
  CheckpointOptions options;
  options.policy = CheckpointOptions::Policy::kKeepMatmuls;
  return options;
}

// ---- where the second run stops

void SetAutocast(bool on) {
  at::autocast::set_autocast_enabled(at::kCPU, on);
  if (on) {
    at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
    at::autocast::increment_nesting();
  } else if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}

int AutocastNesting() {
  const int nesting = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return nesting - 1;
}

// By calls, not by a scope: the stop does not put it back.
TEST(StopTest, LeavesAutocastAsItWas) {
  const auto run = [](const Caller& call) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({4, 4}).requires_grad_(true);
    const Tensor w = torch::randn({4, 4}).requires_grad_(true);
    const auto before = at::autocast::get_autocast_dtype(at::kCPU);
    const Tensor y = call(
        [&w](const Tensor& t) {
          SetAutocast(true);
          const Tensor product = torch::mm(t, w).to(at::kFloat).exp();
          SetAutocast(false);
          at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
          return product;
        },
        x);
    at::autocast::set_autocast_dtype(at::kCPU, before);
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), before);
    EXPECT_EQ(AutocastNesting(), 0);
    return Values{y, x.grad(), w.grad()};
  };
  ExpectSame(run(Plainly), run(AsRegion));
}

TEST(StopTest, IsNotMadeWhereTheFunctionPutsSomethingBackAtItsEnd) {
  const auto run = [](const CheckpointOptions* options) {
    torch::manual_seed(1);
    nn::Dropout dropout(0.5);
    const Tensor x = torch::randn({9}).requires_grad_(true);
    const Unary f = [&](const Tensor& t) {
      dropout->eval();
      const Tensor y = dropout(t).exp();
      dropout->train();
      return y + 1;
    };
    const Tensor y = options == nullptr ? f(x) : Checkpointed(*options, f, x);
    const Tensor next = dropout(x).sum();
    y.sum().backward();
    return Values{y, next, x.grad(), torch::full({}, dropout->is_training())};
  };
  const CheckpointOptions early, whole = ToTheEnd();
  ExpectSame(run(nullptr), run(&whole));
  EXPECT_FALSE(run(&early).back().item<bool>());
}

TEST(StopTest, IsNotMadeWhereAllIsToRun) {
  for (bool early : {true, false}) {
    CheckpointOptions options = ToTheEnd();
    options.stop_early = early;
    const Tensor x = torch::ones({3}, torch::requires_grad());
    const Tensor y = Checkpointed(
        options, [](const Tensor& t) { return t.sqrt().exp() + 1; }, x);
    OperatorCounts counts;
    y.sum().backward();
    EXPECT_EQ(counts.of("aten::add") > 0, !early);
  }
}

// What only a whole run can see.
TEST(StopTest, AWholeRunCountsAllThatIsSaved) {
  for (bool more : {true, false}) {
    bool again = false;
    const Tensor x = torch::ones({2, 3}).requires_grad_(true);
    const Tensor y = Checkpointed(
        ToTheEnd(),
        [&](const Tensor& t) {
          const Tensor h = t.exp().sin().exp();
          if (!again || more) (void)h.cos();  // nobody needs it
          return again && more ? h.exp() : h;
        },
        x);
    again = true;
    EXPECT_THAT(ErrorOf([&] { y.sum().backward(); }),
                AllOf(HasSubstr("[block]"),
                      HasSubstr(more ? "autograd saves more tensors"
                                     : "autograd saved 4 tensors in forward "
                                       "and only 3 when it is run again")));
  }
  // An error after all that is needed is the function's still.
  bool again = false;
  const Tensor x = torch::ones({2}).requires_grad_(true);
  const Tensor y = Checkpointed(
      ToTheEnd(),
      [&](const Tensor& t) {
        const Tensor h = t.exp();
        TORCH_CHECK(!again, "the file is gone");
        return h;
      },
      x);
  again = true;
  EXPECT_THAT(ErrorOf([&] { y.sum().backward(); }),
              HasSubstr("the file is gone"));
}

// ---- kept products

// An inner region's product, kept by the outer one, is written: in the inner
// one, and after it.
TEST(KeptProductTest, OfAnInnerRegionIsWritten) {
  const auto inner = [](const Tensor& t, const Tensor& w, bool within) {
    Tensor y = torch::mm(t, w);
    if (within) y.mul_(2).add_(1);
    return y;
  };
  for (bool within : {true, false}) {
    const auto run = [&](int regions) {
      torch::manual_seed(1);
      const Tensor x = torch::randn({4, 4}).requires_grad_(true);
      const Tensor w = torch::randn({4, 4}).requires_grad_(true);
      const Unary outer = [&](const Tensor& t) {
        CheckpointOptions of_inner;
        if (regions == 3) of_inner = KeepingMatmuls();
        Tensor y = regions >= 2
                       ? Checkpointed(of_inner, inner, t.exp(), w, within)
                       : inner(t.exp(), w, within);
        if (!within) y.mul_(2).add_(1);
        return torch::mm(y, w).sin() * y;
      };
      const Tensor y =
          regions > 0 ? Checkpointed(KeepingMatmuls(), outer, x) : outer(x);
      const auto first = torch::autograd::grad({y.sum()}, {x, w}, {}, true);
      y.sum().backward();
      return Values{y, first[0], first[1], x.grad(), w.grad()};
    };
    SCOPED_TRACE(within);
    const Values plain = run(0);
    ExpectSame(plain, run(1));
    ExpectSame(plain, run(2));
    ExpectSame(plain, run(3));
  }
}

// ---- what the function holds

// A cache that the function writes, with a gradient.
Tensor Extend(const Tensor& t, const Tensor& cache) {
  cache.narrow(0, 0, t.size(0)).copy_(t.exp());
  return torch::mm(t, cache.t()).sin();
}

TEST(CapturedTest, AWrittenInputIsNoCycle) {
  HeldBytes held;
  const Tensor x = torch::ones({64, 64}, torch::requires_grad());
  const int64_t before = HeldBytes::get();
  for (int i = 0; i < 3; ++i) {
    const Tensor cache = torch::zeros({128, 64});
    // No backward.
    const Tensor y = Checkpointed(Extend, x * 1, cache);
  }
  EXPECT_EQ(HeldBytes::get(), before);
}

TEST(CapturedTest, AWrittenCaptureIsGoneAfterBackward) {
  HeldBytes held;
  const Tensor x = torch::ones({64, 64}, torch::requires_grad());
  x.mutable_grad() = torch::zeros_like(x);
  const int64_t before = HeldBytes::get();
  for (int i = 0; i < 3; ++i) {
    const Tensor cache = torch::zeros({128, 64});
    Checkpointed([cache](const Tensor& t) { return Extend(t, cache); }, x * 1)
        .sum()
        .backward();
  }
  EXPECT_EQ(HeldBytes::get(), before);
}

// ---- operators that say nothing of what they write

// Made of others, and not.
Tensor Halved(const Tensor& x) { return x * 0.5; }
Tensor HalvedByHand(const Tensor& x) {
  Tensor out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 0.5f;
  }
  return out;
}
TORCH_LIBRARY(checkpointed_edges_test, m) {
  m.def("halved", &Halved);
  m.def("halved_by_hand",
        torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(HalvedByHand)));
}

Tensor Call(const std::string& name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("checkpointed_edges_test::" + name).c_str(), "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

TEST(GuessedWritesTest, ReadsAreChecked) {
  for (const char* name : {"halved", "halved_by_hand"}) {
    Tensor bias = torch::ones({3});
    const Tensor x = torch::ones({2, 3}, torch::requires_grad());
    const Unary f = [&](const Tensor& t) {
      return (t * Call(name, bias)).exp();
    };
    Tensor y = Checkpointed(f, x);
    y.sum().backward();
    y = Checkpointed(f, x);
    bias.add_(1);
    EXPECT_THAT(ErrorOf([&] { y.sum().backward(); }),
                AllOf(HasSubstr("a tensor of sizes [3], which operator "
                                "checkpointed_edges_test::"),
                      HasSubstr(name), HasSubstr("was changed in place")));
  }
}

// ---- inputs of any strides

// What goes to the host for keep_on_cpu, and what comes back.
TEST(SpanTest, IsAsMuchMemoryAsATensorHas) {
  const Tensor x = torch::randn({6, 8});
  const struct {
    Tensor tensor;
    int64_t numel;
  } cases[] = {
      {x, 48},
      {x.t(), 48},
      {x[1].expand({100, 8}), 8},
      {x[2][3].expand({10, 10}), 1},
      {x.narrow(1, 2, 3), 5 * 8 + 3},
      {x.view({-1}).unfold(0, 3, 1), 48},
      {torch::ones({}), 1},
      {torch::ones({3, 0}), 0},
  };
  for (const auto& c : cases) {
    const Tensor span = SpanOf(c.tensor).clone();
    EXPECT_EQ(span.numel(), c.numel);
    const Tensor back = OverSpan(span, c.tensor.sizes(), c.tensor.strides());
    EXPECT_TRUE(SameBits(back.contiguous(), c.tensor.contiguous()));
    EXPECT_EQ(back.strides(), c.tensor.strides());
  }
}

}  // namespace
}  // namespace tessera
