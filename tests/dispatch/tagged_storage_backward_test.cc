// Backward over parameters that an engine owns: which gradients arrive, when
// units are whole, what an error leaves behind.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tests/dispatch/tagged_storage_util.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Values;

// Removes ", which is output 0 of TBackward0,": libtorch does not tell hooks
// where a saved tensor came from.
std::string WithoutOrigin(const absl::Status& status) {
  return std::regex_replace(std::string(status.message()),
                            std::regex(", which is output \\d+ of \\w+,"), "");
}

TEST_F(TaggedStorageTest,
       StepBetweenForwardAndBackwardIsTheVersionErrorOfPlainTorch) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  // Both need the weight's values in backward; the second saves a view of it.
  const std::vector<std::function<at::Tensor(torch::nn::Linear&)>> losses = {
      [&](auto& m) { return MeanSquare(x[0] * m->weight); },
      [&](auto& m) { return MeanSquare(m(x)); }};
  for (const auto& loss : losses) {
    // An optimizer that works in place tells autograd so; the fused kernel,
    // which steps the plain module, does not.
    auto train = [&] {
      t.Train(loss);
      torch::NoGradGuard no_grad;
      t.plain->weight.mul_(1);
    };
    const at::Tensor plain = t.ForwardPlain(loss), tagged = loss(t.tagged);
    train();
    const absl::Status expected = t.BackwardPlain(plain);
    ASSERT_THAT(expected, FailsWith(HasSubstr("modified by an inplace")));
    const absl::Status got = t.engine->Backward(tagged);
    EXPECT_EQ(std::string(got.message()), WithoutOrigin(expected));
    t.ExpectFreed();
    train();
  }
}

TEST_F(TaggedStorageTest, FreeingAndGatheringDoNotCountAsChanges) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  const at::Tensor plain =
      t.ForwardPlain([&](auto& m) { return MeanSquare(m(x)); });
  const at::Tensor tagged = MeanSquare(t.tagged(x));
  const int64_t version = t.tagged->weight._version();
  { Use pin(t.tagged->weight); }
  TESSERA_EXPECT_OK(t.engine->Parameter("weight"));
  EXPECT_EQ(t.tagged->weight._version(), version);
  TESSERA_EXPECT_OK(t.BackwardPlain(plain));
  TESSERA_EXPECT_OK(t.engine->Backward(tagged));
  t.ExpectSameGradients();
}

TEST_F(TaggedStorageTest, InPlaceChangeOfASavedActivationIsStillAnError) {
  auto t = LinearTwins();
  t.Create();
  auto changed = [&](torch::nn::Linear& m, bool leaf) {
    torch::manual_seed(5);
    at::Tensor x = torch::randn({4, 8}).requires_grad_();
    at::Tensor h = leaf ? x : x * 2;
    at::Tensor loss = MeanSquare(m(h.pow(2)));
    torch::NoGradGuard no_grad;
    h.mul_(5);
    return loss;
  };
  for (bool leaf : {true, false}) {
    const absl::Status expected = t.BackwardPlain(
        t.ForwardPlain([&](auto& m) { return changed(m, leaf); }));
    ASSERT_THAT(expected, FailsWith(HasSubstr("modified by an inplace")));
    const absl::Status got = t.engine->Backward(changed(t.tagged, leaf));
    EXPECT_EQ(std::string(got.message()), WithoutOrigin(expected));
    t.ExpectFreed();
  }
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

// Two parameters in one unit and a layer in another, of which a loss uses what
// it is told to.
struct PartsImpl : torch::nn::Module {
  PartsImpl()
      : used(register_parameter("used", torch::randn({8, 8}))),
        extra(register_parameter("extra", torch::randn({8}))),
        layer(register_module("layer", torch::nn::Linear(8, 8))),
        other(register_module("other", torch::nn::Linear(8, 8))) {}
  at::Tensor Loss(const at::Tensor& x, bool with_extra, bool with_layer) {
    at::Tensor h = torch::tanh(x.mm(used));
    if (with_extra) h = h * extra;
    if (with_layer) h = layer(h);
    return MeanSquare(other(h));
  }

  at::Tensor used, extra;
  torch::nn::Linear layer, other;
};
TORCH_MODULE(Parts);

class OfStage : public TaggedStorageTest,
                public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(TaggedStorageTest, OfStage, Values(0, 1, 2, 3),
                         ::testing::PrintToStringParamName());

TEST_P(OfStage, UnusedParameterIsSkippedNotDecayed) {
  Twins<Parts> t([] { return Parts(); });
  TwinOptions options;
  options.stage = GetParam();
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  const at::Tensor extra = t.plain->extra.detach().clone();
  // The optimizer's step count is that of the parameter, not of the engine.
  for (auto [with_extra, with_layer] : {std::pair(false, false),
                                        {false, true},
                                        {true, false},
                                        {false, false},
                                        {true, true}}) {
    SCOPED_TRACE(t.engine->step());
    t.Train([&, e = with_extra, l = with_layer](auto& m) {
      return m->Loss(x, e, l);
    });
    if (t.engine->step() == 2) {
      EXPECT_THAT(t.engine->Parameter("extra"),
                  IsOkAndHolds(::testing::Truly([&](const at::Tensor& got) {
                    return bool{SameBits(got, extra)};
                  })));
    }
  }
}

TEST_P(OfStage, ParameterWithoutGradientInOneMicroBatchIsTrained) {
  Twins<Parts> t([] { return Parts(); });
  TwinOptions options;
  options.stage = GetParam();
  options.accumulation = 3;
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  for (int step = 0; step < 3; ++step) {
    int calls = 0;  // two a micro-batch: one for each module
    t.Train([&](auto& m) {
      const int micro_batch = calls++ / 2;
      return m->Loss(x, micro_batch == step, micro_batch != 1);
    });
  }
}

TEST_P(OfStage, ParameterUnfrozenLaterIsTrained) {
  Twins<Parts> t([] {
    Parts parts;
    parts->extra.requires_grad_(false);
    for (auto& p : parts->layer->parameters()) p.requires_grad_(false);
    return parts;
  });
  TwinOptions options;
  options.stage = GetParam();
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  auto loss = [&](auto& m) { return m->Loss(x, true, true); };
  t.Train(loss);
  t.Train(loss);
  for (auto* m : {&t.plain, &t.tagged}) {
    (*m)->extra.requires_grad_(true);
    (*m)->layer->weight.requires_grad_(true);
  }
  for (int i = 0; i < 3; ++i) t.Train(loss);
  for (auto* m : {&t.plain, &t.tagged}) (*m)->used.requires_grad_(false);
  for (int i = 0; i < 2; ++i) t.Train(loss);
}

// Uses of one layer, some of them inside of segments that are recomputed.
struct Reentrant {
  std::string name;
  std::function<at::Tensor(torch::nn::Linear&, const at::Tensor& x,
                           const RecomputedSegment::Segment&)>
      forward;
};

class ReentrantCheckpoint
    : public TaggedStorageTest,
      public ::testing::WithParamInterface<std::tuple<Reentrant, int>> {};

INSTANTIATE_TEST_SUITE_P(
    TaggedStorageTest, ReentrantCheckpoint,
    ::testing::Combine(
        Values(Reentrant{"Twice",
                         [](auto& m, const auto& x, const auto& f) {
                           return RecomputedSegment::apply(
                               RecomputedSegment::apply(x, f), f);
                         }},
               Reentrant{"FourTimes",
                         [](auto& m, const auto& x, const auto& f) {
                           at::Tensor h = x;
                           for (int i = 0; i < 4; ++i) {
                             h = RecomputedSegment::apply(h, f);
                           }
                           return h;
                         }},
               Reentrant{"ThenOutside",
                         [](auto& m, const auto& x, const auto& f) {
                           return m(RecomputedSegment::apply(
                               RecomputedSegment::apply(x, f), f));
                         }},
               Reentrant{"AfterOutside",
                         [](auto& m, const auto& x, const auto& f) {
                           return RecomputedSegment::apply(
                               RecomputedSegment::apply(m(x), f), f);
                         }},
               Reentrant{"Deep",
                         [](auto& m, const auto& x, const auto& f) {
                           // Deeper than autograd nests in one thread.
                           RecomputedSegment::Segment outer = f;
                           for (int i = 0; i < 70; ++i) {
                             outer = [inner = outer](const at::Tensor& h) {
                               return RecomputedSegment::apply(h, inner);
                             };
                           }
                           return outer(x);
                         }},
               Reentrant{"Beside",
                         [](auto& m, const auto& x, const auto& f) {
                           return RecomputedSegment::apply(x, f) + m(x * 3) +
                                  RecomputedSegment::apply(x + 1, f);
                         }}),
        Values(0, 1, 2, 3)),
    [](const auto& info) {
      return std::get<0>(info.param).name + "Stage" +
             std::to_string(std::get<1>(info.param));
    });

// A hook's call is not "the last gradient": it comes once for each segment.
TEST_P(ReentrantCheckpoint, UsedTwice) {
  const auto& [uses, stage] = GetParam();
  for (int accumulation : {1, 2}) {
    SCOPED_TRACE(accumulation);
    auto t = LinearTwins();
    TwinOptions options;
    options.stage = stage;
    options.accumulation = accumulation;
    t.Create(options);
    const at::Tensor x = torch::randn({4, 8}).requires_grad_();
    for (int step = 0; step < 3; ++step) {
      t.Train([&, &forward = uses.forward](auto& m) {
        return MeanSquare(forward(m, x, [m](const at::Tensor& h) {
          auto layer = m;
          return torch::tanh(layer(h));
        }));
      });
    }
  }
}

class LateUse : public TaggedStorageTest,
                public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(TaggedStorageTest, LateUse, Values(0, 1, 1000000),
                         ::testing::PrintToStringParamName());

// Units stay whole while backward runs; at its end, none does.
TEST_P(LateUse, InBackwardIsFreedAtItsEnd) {
  auto t = PairTwins();
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  // The weight of `a` is needed by value after its last gradient came.
  std::vector<at::Tensor> inputs;
  auto loss = [&](auto& m) {
    torch::manual_seed(5);
    inputs.push_back(torch::randn({4, 8}).requires_grad_());
    const at::Tensor h = inputs.back().mm(m->a->weight.detach());
    return MeanSquare(m(h));
  };
  t.Backward(loss);  // expects units freed at its end
  EXPECT_TRUE(SameBits(inputs[0].grad(), inputs[1].grad()));
  t.ExpectSameGradients();
}

TEST_P(LateUse, UnitWithAnUnusedParameterIsFreedToo) {
  auto t = LinearTwins();
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(x.mm(m->weight.t())); });
}

TEST_F(TaggedStorageTest, GradFnIsNotAskedOfViews) {
  Twins<torch::nn::Embedding> t([] { return torch::nn::Embedding(10, 8); });
  t.Create();
  for (auto* m : {&t.plain, &t.tagged}) {
    torch::NoGradGuard no_grad;
    // libtorch refuses to name the grad_fn of such a view after the write.
    TESSERA_EXPECT_OK(CatchTorch("fill_", [&] { (*m)->weight[0].fill_(0); }));
  }
  t.ExpectSameParameters();
  const at::Tensor x = torch::randint(10, {6}, torch::kLong);
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) { return MeanSquare(m(x)); });
  }
}

}  // namespace
}  // namespace tessera
