// Autocast on parameters that an engine owns: nothing of its casts is held from
// forward to backward, and what comes out is plain libtorch's to the bit.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "tests/dispatch/autocast_scope.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

// Whether the user has autocast's cache on.
class AutocastCache : public TaggedStorageTest,
                      public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(TaggedStorageTest, AutocastCache, ::testing::Bool(),
                         ::testing::PrintToStringParamName());

// torch::nn::Linear gives libtorch a view of its weight, which autocast's cache
// does not take.
struct WideImpl : torch::nn::Module {
  static constexpr int64_t kDim = 64, kLayers = 4;
  WideImpl() {
    for (int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(torch::nn::Linear(kDim, kDim));
    }
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) {
      const auto* l = layer->as<torch::nn::Linear>();
      x = torch::tanh(torch::linear(x, l->weight, l->bias));
    }
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Wide);

TEST_P(AutocastCache, CastsAreNotHeldFromForwardToBackward) {
  constexpr int64_t kBiases = WideImpl::kLayers * WideImpl::kDim * int64_t{2};
  constexpr int64_t kWeights = kBiases * WideImpl::kDim;
  Twins<Wide> t([] { return Wide(); });
  t.Create();
  const at::Tensor x = torch::randn({2, WideImpl::kDim}).requires_grad_();
  auto held = [&](Wide& m) {
    HeldBytes bytes;
    at::Tensor loss;
    int64_t inside;
    {
      LocalAutocast autocast(GetParam());
      loss = MeanSquare(m(x));
      inside = bytes.get();
    }
    return std::make_pair(inside, bytes.get());
  };
  held(t.tagged);  // what is allocated once for all
  std::pair<int64_t, int64_t> plain;
  {
    PlainAutograd plain_autograd;
    plain = held(t.plain);
  }
  const auto tagged = held(t.tagged);
  EXPECT_EQ(plain.second - tagged.second, kWeights);
  // In the scope libtorch's cache holds them all; ours, what tells its scopes
  // apart.
  EXPECT_EQ(plain.first - tagged.first,
            kWeights + (GetParam() ? kBiases - 2 : 0));
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      LocalAutocast autocast(GetParam());
      return MeanSquare(m(x));
    });
  }
}

// An operator that autocast does not know, made of operators that it does.
TEST_P(AutocastCache, CastsInsideOfOperatorsAreNotHeld) {
  Twins<torch::nn::GRU> t([] { return torch::nn::GRU(16, 16); });
  t.Create();
  const at::Tensor x = torch::randn({2, 3, 16}).requires_grad_();
  auto held = [&](torch::nn::GRU& m) {
    HeldBytes bytes;
    at::Tensor y;
    {
      LocalAutocast autocast(GetParam());
      y = std::get<0>(m(x));
    }
    return bytes.get();
  };
  held(t.tagged);  // what is allocated once for all
  int64_t plain;
  {
    PlainAutograd plain_autograd;
    plain = held(t.plain);
  }
  EXPECT_EQ(plain - held(t.tagged), 2 * (3 * 16) * 16 * 2);
}

// oneDNN has no LSTM in bfloat16 for processors with AVX2 alone, and libtorch
// asks it for one all the same.
bool HasBFloat16Lstm() {
  static const bool has = [] {
    try {
      LocalAutocast autocast(/*cache=*/true);
      torch::nn::LSTM(8, 8)->forward(torch::randn({1, 4, 8}));
      return true;
    } catch (const std::exception&) {
      std::puts("libtorch has no LSTM in bfloat16 here: it runs in float32");
      return false;
    }
  }();
  return has;
}

// Modules of which every one casts in its own way.
struct ManyImpl : torch::nn::Module {
  ManyImpl()
      : conv(register_module(
            "conv",
            torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)))),
        up(register_module(
            "up", torch::nn::ConvTranspose1d(
                      torch::nn::ConvTranspose1dOptions(4, 4, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(4))),
        prelu(register_module("prelu", torch::nn::PReLU())),
        lstm(register_module(
            "lstm",
            torch::nn::LSTM(
                torch::nn::LSTMOptions(8, 8).num_layers(2).bidirectional(
                    true)))),
        layer(register_module(
            "layer", torch::nn::TransformerEncoderLayer(
                         torch::nn::TransformerEncoderLayerOptions(16, 2)
                             .dim_feedforward(32)
                             .dropout(0)))),
        cell(register_module("cell", torch::nn::GRUCell(16, 8))),
        bilinear(register_module("bilinear", torch::nn::Bilinear(8, 8, 4))),
        out(register_parameter("out", torch::randn({4, 3}))) {}

  at::Tensor forward(const at::Tensor& x) {  // [N, 4, 8]
    at::Tensor h = conv(x.unsqueeze(1)).mean(1);
    h = prelu(norm(up(h).to(at::kFloat)));
    {
      std::optional<LocalAutocast> off;
      if (!HasBFloat16Lstm()) off.emplace(/*cache=*/true, /*on=*/false);
      h = std::get<0>(lstm(h.to(at::kFloat)));
    }
    h = layer(h.to(at::kFloat)).mean(1).to(at::kFloat);
    at::Tensor state = torch::zeros({x.size(0), 8});
    for (int i = 0; i < 3; ++i) state = cell(h, state.to(at::kFloat));
    return torch::einsum(
        "ni,ij->nj",
        {bilinear(state.to(at::kFloat), state.to(at::kFloat)), out});
  }
  torch::nn::Conv2d conv;
  torch::nn::ConvTranspose1d up;
  torch::nn::BatchNorm1d norm;
  torch::nn::PReLU prelu;
  torch::nn::LSTM lstm;
  torch::nn::TransformerEncoderLayer layer;
  torch::nn::GRUCell cell;
  torch::nn::Bilinear bilinear;
  at::Tensor out;
};
TORCH_MODULE(Many);

TEST_P(AutocastCache, ManyModules) {
  HasBFloat16Lstm();  // draws random numbers, once
  Twins<Many> t([] { return Many(); });
  t.Create();
  const at::Tensor x = torch::randn({3, 4, 8});
  for (int i = 0; i < 3; ++i) {
    t.Train([&](auto& m) {
      LocalAutocast autocast(GetParam());
      return MeanSquare(m(x));
    });
  }
  EXPECT_EQ(t.comm->leaks(), 0);
}

// With the cache on, libtorch adds the gradients of all uses within a scope up
// in bfloat16, and those of several scopes in float32.
TEST_P(AutocastCache, ParameterUsedSeveralTimes) {
  Twins<Wide> t([] { return Wide(); });
  t.Create();
  const at::Tensor x = torch::randn({4, WideImpl::kDim});
  for (bool in_one_scope : {true, false, true}) {
    t.Train([&](auto& m) {
      at::Tensor h = x;
      auto outer = std::make_unique<LocalAutocast>(GetParam());
      for (int i = 0; i < 3; ++i) {
        h = h + m(h);
        if (in_one_scope) continue;
        outer.reset();
        outer = std::make_unique<LocalAutocast>(GetParam());
      }
      return MeanSquare(h);
    });
  }
}

TEST_P(AutocastCache, OtherDtypesAndScopesWithout) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    t.Train([&](auto& m) {
      LocalAutocast autocast(GetParam(), /*on=*/true, dtype);
      at::Tensor h = m(x);
      EXPECT_EQ(h.scalar_type(), dtype);
      {
        LocalAutocast off(GetParam(), /*on=*/false);
        h = m(h.to(at::kFloat));
        EXPECT_EQ(h.scalar_type(), at::kFloat);
      }
      return MeanSquare(m(h));
    });
  }
}

TEST_P(AutocastCache, RetainedGraphAndDoubleBackward) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  t.Train([&](auto& m) {
    LocalAutocast autocast(GetParam());
    const at::Tensor y = m(x);
    const at::Tensor first =
        torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
    const at::Tensor gradient =
        torch::autograd::grad({MeanSquare(y)}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    return MeanSquare(y) + gradient.pow(2).sum() + first.sum();
  });
}

TEST_F(TaggedStorageTest, GraphOfABackwardHoldsNoCasts) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({1, 8}).requires_grad_();
  auto held = [&](Pair& m) {
    HeldBytes bytes;
    LocalAutocast autocast(/*cache=*/false);
    const at::Tensor y = m(x);
    const at::Tensor gradient = torch::autograd::grad(
        {y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return bytes.get();
  };
  int64_t plain;
  {
    PlainAutograd plain_autograd;
    plain = held(t.plain);
  }
  EXPECT_EQ(plain - held(t.tagged), 2 * 8 * 8 * 2);
}

TEST_F(TaggedStorageTest, RecomputedSegmentUnderAutocast) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      LocalAutocast autocast(/*cache=*/true);
      return MeanSquare(RecomputedSegment::apply(x, [&m](const at::Tensor& in) {
        LocalAutocast inner(/*cache=*/true);
        return m(in);
      }));
    });
  }
}

// A Step within one scope renews casts; libtorch's own cache would keep old
// ones.
TEST_P(AutocastCache, CastsFollowAStep) {
  Twins<Wide> t([] { return Wide(); });
  t.Create();
  const at::Tensor x = torch::randn({4, WideImpl::kDim});
  LocalAutocast scope(GetParam());
  for (int i = 0; i < 3; ++i) {
    t.Train([&](Wide& m) {
      const bool is_plain = m.get() == t.plain.get();
      LocalAutocast autocast(GetParam() && !is_plain);
      return MeanSquare(m(x));
    });
  }
}

TEST_F(TaggedStorageTest, AutocastCacheServesTensorsThatNoUnitOwns) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  const at::Tensor mine = torch::randn({8, 8}).requires_grad_();
  auto cast = [&] {
    return at::autocast::cached_cast(at::kBFloat16, mine, at::kCPU);
  };
  LocalAutocast autocast(/*cache=*/true);
  const at::Tensor first = cast();
  t.tagged(x.mm(mine));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(cast().is_same(first));
  EXPECT_THROW(t.tagged(torch::randn({4, 7})), c10::Error);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(cast().is_same(first));
}

TEST_F(TaggedStorageTest, GraphWithCastsOutlivesTheEngine) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  auto loss = [&](auto& m) {
    LocalAutocast autocast(/*cache=*/true);
    return MeanSquare(m(m(x)));
  };
  const at::Tensor expected = t.ForwardPlain(loss), got = loss(t.tagged);
  TESSERA_ASSERT_OK(t.engine->Close());
  t.engine.reset();
  {
    PlainAutograd plain_autograd;
    expected.backward();
  }
  got.backward();
  EXPECT_TRUE(SameBits(t.plain->weight.grad(), t.tagged->weight.grad()));
  EXPECT_TRUE(SameBits(t.plain->bias.grad(), t.tagged->bias.grad()));
}

}  // namespace
}  // namespace tessera
