#include "sharding/trace/trace.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/trace/construct_fake.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace nn = torch::nn;
using at::Tensor;

struct Two : nn::Module {
  Two()
      : first(register_module("first", nn::Linear(200, 300))),
        second(register_module("second", nn::Linear(300, 100))) {}
  nn::Linear first, second;
};

Tensor Batch() { return torch::randn({400, 200}); }

TEST(TraceTest, TellsEventsInTheirOrder) {
  Two model;
  const auto trace = TakeTrace(model, [&] {
    return model.second->forward(model.first->forward(Batch())).sum();
  });
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->parameters.size(), 4u);
  EXPECT_EQ(trace->parameters[2].name, "second.weight");
  std::string uses, gradients;
  for (const TraceEvent& e : trace->events) {
    if (e.kind == TraceEvent::Kind::kTouch) {
      uses += (e.backward ? "b" : "f") + std::to_string(e.what);
    }
    if (e.kind == TraceEvent::Kind::kGradient) {
      EXPECT_TRUE(e.backward);
      gradients += std::to_string(e.what);
      ASSERT_GE(e.other, 0) << "it lies in an allocation of the trace";
    }
  }
  // addmm has weight and bias; backward needs the second weight alone, since
  // the batch requires no gradient.
  EXPECT_THAT(uses, ::testing::AnyOf("f0f1f2f3b2", "f1f0f3f2b2"));
  EXPECT_THAT(gradients, ::testing::AnyOf("3210", "2310", "3201", "2301"));
  // The batch, and what `second` was given.
  EXPECT_EQ(trace->saved_bytes, (400 * 200 + 400 * 300 + 1) * 4);
  EXPECT_EQ(trace->flops(),
            2 * 400 * (200 * 300 + 300 * 100) +  // forward
                2 * 400 * (2 * 300 * 100 + 200 * 300));
}

// A parameter of two names is one.
TEST(TraceTest, LeavesTiedParametersAsTheyWere) {
  Two model;
  model.second->weight =
      model.second->register_parameter("tied", model.first->weight);
  model.first->weight.sum().backward();
  const Tensor values = model.first->weight.clone();
  const Tensor gradient = model.first->weight.grad();
  const void* const data = model.first->weight.data_ptr();
  const auto trace =
      TakeTrace(model, [&] { return model.first->forward(Batch()).sum(); }, {});
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(model.first->weight.data_ptr(), data);
  EXPECT_TRUE(torch::equal(model.first->weight, values));
  EXPECT_TRUE(model.first->weight.grad().is_same(gradient));
}

// Assertions are checked where their values are known.
TEST(TraceTest, ChecksAssertionsOfKnownValues) {
  Two model;
  const auto run = [&](int64_t size, int64_t below) {
    return TakeTrace(model,
                     [&] {
                       const Tensor numbers = torch::randint(100, {size});
                       at::_assert_async(numbers.lt(below).all(), "too large");
                       return model.first->forward(Batch()).sum();
                     })
        .status();
  };
  EXPECT_THAT(run(100, 100), IsOk());
  EXPECT_THAT(std::string(run(100, 0).message()), HasSubstr("too large"));
  EXPECT_THAT(run(100000, 0), IsOk()) << "values are not known";
}

TEST(TraceTest, LeavesTheModuleAsItWas) {
  Two model;
  const Tensor x = Batch();
  model.first->forward(x).sum().backward();
  const Tensor weight = model.first->weight.clone();
  const Tensor gradient = model.first->weight.grad();
  const void* const data = model.first->weight.data_ptr();
  torch::manual_seed(3);
  const Tensor drawn = torch::rand({4});
  torch::manual_seed(3);
  TraceOptions options;
  options.dtype = [](const Tensor&) { return at::kBFloat16; };
  const auto trace = TakeTrace(
      model,
      [&] {
        torch::rand({4});  // small: drawn really
        return model.second->forward(model.first->forward(x.to(at::kBFloat16)))
            .sum();
      },
      options);
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->parameters[0].bytes, 200 * 300 * 2);
  EXPECT_EQ(model.first->weight.data_ptr(), data);
  EXPECT_EQ(model.first->weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(model.first->weight, weight));
  EXPECT_TRUE(model.first->weight.grad().is_same(gradient));
  EXPECT_FALSE(model.second->weight.grad().defined());
  EXPECT_TRUE(torch::equal(torch::rand({4}), drawn));
  // And it trains on.
  model.second->forward(model.first->forward(x)).sum().backward();
  EXPECT_TRUE(model.second->weight.grad().defined());
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int* calls) : calls(calls) {}
  void operator()(const Tensor&) override { ++*calls; }
  int* const calls;
};

// They are not called: a trace has no values that they could look at.
TEST(TraceTest, HooksOfTheUserStay) {
  Two model;
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(
      model.first->weight, std::make_unique<CountingHook>(&calls));
  const auto loss = [&] { return model.first->forward(Batch()).sum(); };
  ASSERT_THAT(TakeTrace(model, loss), IsOk());
  EXPECT_EQ(calls, 0);
  // After a trace that fails, too.
  EXPECT_THAT(TakeTrace(model, [&] { return Batch(); }),
              ::testing::Not(IsOk()));
  loss().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(model.first->bias),
            nullptr);
}

TEST(TraceTest, BuffersAreNotWritten) {
  nn::BatchNorm1d norm(64);
  nn::Sequential model(nn::Linear(200, 64), norm);
  const auto trace =
      TakeTrace(*model, [&] { return model->forward(Batch()).square().sum(); });
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(norm->running_mean.abs().sum().item<float>(), 0);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
}

TEST(TraceTest, SmallTensorsHaveTheirValues) {
  Two model;
  int64_t rows = 0;
  const auto trace = TakeTrace(model, [&] {
    const Tensor lengths = torch::tensor({3, 5, 2}, torch::kLong);
    const Tensor mask = torch::arange(6).unsqueeze(0) < lengths.unsqueeze(1);
    rows = mask.sum().item<int64_t>();
    return model.first->forward(torch::randn({rows, 200})).sum();
  });
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(rows, 3 + 5 + 2);
}

TEST(TraceTest, ModulesOfAnySizeAreConstructed) {
  auto model = ConstructFake([] {
    nn::Linear large(1 << 20, 1 << 18);  // 1 TiB
    nn::init::orthogonal_(nn::Linear(300, 300)->weight);
    nn::init::normal_(large->weight);
    return large;
  });
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weight.numel(), int64_t{1} << 38);
  const auto trace = TakeTrace(**model, [&] {
    return (*model)->forward(torch::randn({8, 1 << 20})).sum();
  });
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_GT(trace->Peak().bytes, int64_t{1} << 40);
}

// ---- what cannot be traced

absl::Status ErrorOf(const Two& model, const std::function<Tensor()>& loss,
                     const TraceOptions& options = {}) {
  return TakeTrace(model, loss, options).status();
}

TEST(TraceErrorTest, ValuesAreNamedWithOperatorAndModule) {
  Two model;
  EXPECT_THAT(ErrorOf(model,
                      [&] {
                        const Tensor h = model.first->forward(Batch());
                        return h.sum().item<float>() > 0 ? h.sum() : -h.sum();
                      }),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("[first] aten::_local_scalar_dense"),
                             HasSubstr("item()"))));
  EXPECT_THAT(
      ErrorOf(model,
              [&] {
                const Tensor h =
                    model.second->forward(model.first->forward(Batch()));
                return h.index_select(0, (h.sum(1) > 0).nonzero()[0]).sum();
              }),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("[second] aten::nonzero"),
                     HasSubstr("fixed capacity"))));
}

TEST(TraceErrorTest, AccessorsAreRefused) {
  Two model;
  EXPECT_THAT(ErrorOf(model,
                      [&] {
                        const Tensor h = model.first->forward(Batch());
                        return h.accessor<float, 2>()[0][0] > 0 ? h.sum()
                                                                : -h.sum();
                      }),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("follows the sizes of tensors, not their "
                                 "values")));
}

// An operator of the user's with a kernel of the CPU alone.
Tensor Doubled(const Tensor& x) {
  Tensor y = torch::empty({x.size(0), 2});
  y.fill_(2 * x.const_data_ptr<float>()[0]);
  return y;
}
TORCH_LIBRARY(tessera_trace_test, m) { m.def("doubled(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(tessera_trace_test, CPU, m) { m.impl("doubled", &Doubled); }

Tensor CallDoubled(const Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tessera_trace_test::doubled", "")
          .typed<Tensor(const Tensor&)>();
  return op.call(x);
}

TEST(TraceErrorTest, UnknownOperatorsAreTriedOnZerosWhereThatIsCheap) {
  Two model;
  const auto loss = [&] {
    const Tensor h = model.first->forward(Batch());
    at::NoGradGuard no_grad;
    const Tensor doubled = CallDoubled(h);
    EXPECT_EQ(doubled.sizes(), at::IntArrayRef({400, 2}));
    at::AutoGradMode grad(true);
    return h.sum();
  };
  EXPECT_THAT(ErrorOf(model, loss), IsOk());
  TraceOptions options;
  options.tracer.compute_bytes = 1000;
  EXPECT_THAT(
      ErrorOf(model, loss, options),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("[first] tessera_trace_test::doubled"),
                     HasSubstr("480000 bytes"), HasSubstr("Meta device"))));
}

TEST(TraceErrorTest, ErrorsOfTheModelAreItsOwn) {
  Two model;
  EXPECT_THAT(
      ErrorOf(model, [&] { return model.second->forward(Batch()).sum(); }),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("cannot be multiplied")));
  EXPECT_THAT(ErrorOf(model, [&] { return Batch(); }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no scalar to go back from")));
  // Nothing of a failed trace is left.
  EXPECT_THAT(
      ErrorOf(model, [&] { return model.first->forward(Batch()).sum(); }),
      IsOk());
}

}  // namespace
}  // namespace tessera
