// Normalisations of which a unit owns the parameters, in another dtype than the
// input or the running statistics. Plain libtorch with casts by hand gives the
// same bits.
#include <torch/torch.h>

#include <functional>
#include <tuple>
#include <vector>

#include "tests/dispatch/owned_tensors.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

// The parameters are float32.
class NormOf : public TaggedStorageTest,
               public ::testing::WithParamInterface<OperatorCase> {};

const std::vector<OperatorCase>& Norms() {
  static const auto* cases = new std::vector<OperatorCase>{
      {"LayerNorm",
       {{8}, {8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::layer_norm(x[0], {8}, w[0], w[1]))},
      {"NativeLayerNorm",
       {{8}, {8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::native_layer_norm(x[0], {8}, w[0], w[1], 1e-5))},
      {"GroupNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::group_norm(x[0], 2, w[0], w[1]))},
      {"NativeGroupNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(
           torch::native_group_norm(x[0], w[0], w[1], 2, 4, 8, 2, 1e-5))},
      {"RmsNorm",
       {{8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::rms_norm(x[0], {8}, w[0], 1e-5))},
      {"FusedRmsNorm",
       {{8}},
       {{4, 8}},
       TESSERA_OF_W_X(at::_fused_rms_norm(x[0], {8}, w[0], 1e-5))},
      {"BatchNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::batch_norm(x[0], w[0], w[1], {}, {}, true, 0.1,
                                        1e-5, false))},
      {"NativeBatchNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::native_batch_norm(x[0], w[0], w[1], {}, {}, true,
                                               0.1, 1e-5))},
      {"InstanceNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::instance_norm(x[0], w[0], w[1], {}, {}, true, 0.1,
                                           1e-5, false))}};
  return *cases;
}
INSTANTIATE_TEST_SUITE_P(TaggedStorageTest, NormOf,
                         ::testing::ValuesIn(Norms()), CaseNameOf);

TEST_P(NormOf, A16BitInputIsComputedInFloat32) {
  const OperatorCase& c = GetParam();
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    SCOPED_TRACE(c10::toString(dtype));
    ExpectSame(
        [&](auto& w, auto& x) { return c.f(w, To(at::kFloat, x)).to(dtype); },
        c.f, Random(c.parameters, at::kFloat), Random(c.inputs, dtype));
  }
}

// The normalised tensor may itself belong to a unit.
TEST_F(TaggedStorageTest, NormalisedParameterIsAnInput) {
  Tensors w = Random({{4, 8}}, at::kBFloat16);
  for (const at::Tensor& t : Random({{8}, {8}}, at::kFloat)) w.push_back(t);
  ExpectSame(
      [](auto& w, auto&) {
        return torch::layer_norm(w[0].to(at::kFloat), {8}, w[1], w[2])
            .to(at::kBFloat16);
      },
      [](auto& w, auto&) { return torch::layer_norm(w[0], {8}, w[1], w[2]); },
      w, {});
}

// Running statistics stay float32, and the user's own tensors are written.
TEST_F(TaggedStorageTest, RunningStatisticsAreNeverCast) {
  using Norm = std::function<at::Tensor(const at::Tensor& x, const Tensors& w,
                                        const Tensors& statistics)>;
  auto batch = [](bool training) -> Norm {
    return [=](auto& x, auto& w, auto& s) {
      return torch::batch_norm(x, w[0], w[1], s[0], s[1], training, 0.1, 1e-5,
                               false);
    };
  };
  const Norm native = [](auto& x, auto& w, auto& s) {
    return std::get<0>(
        torch::native_batch_norm(x, w[0], w[1], s[0], s[1], true, 0.1, 1e-5));
  };
  const Norm instance = [](auto& x, auto& w, auto& s) {
    return torch::instance_norm(x, w[0], w[1], s[0], s[1], true, 0.1, 1e-5,
                                false);
  };
  for (const Norm& norm : {batch(true), batch(false), native, instance}) {
    for (at::ScalarType parameters : {at::kBFloat16, at::kFloat}) {
      for (at::ScalarType input : {at::kBFloat16, at::kFloat}) {
        const Tensors old = {torch::randn({4}), torch::rand({4}) + 0.5};
        const Tensors plain = Copies(old), tagged = Copies(old);
        const bool all_float = parameters == at::kFloat && input == at::kFloat;
        ExpectSame(
            [&](auto& w, auto& x) {
              return norm(x[0].to(at::kFloat), To(at::kFloat, w), plain)
                  .to(all_float ? at::kFloat : at::kBFloat16);
            },
            [&](auto& w, auto& x) { return norm(x[0], w, tagged); },
            Random({{4}, {4}}, parameters), Random({{2, 4, 8}}, input));
        for (int i = 0; i < 2; ++i) {
          EXPECT_TRUE(SameBits(plain[i], tagged[i])) << i;
        }
      }
    }
  }
}

TEST_F(TaggedStorageTest, StatisticsOfTwoDtypesAreAnError) {
  const Tensors w = Random({{4}, {4}}, at::kBFloat16);
  at::Tensor mean = torch::zeros({4}), var = torch::ones({4}, at::kDouble);
  Owner owner(w);
  EXPECT_FALSE(CatchTorch("batch_norm", [&] {
                 torch::batch_norm(torch::randn({2, 4, 8}), w[0], w[1], mean,
                                   var, true, 0.1, 1e-5, false);
               }).ok());
}

// A network with casts by hand, or without.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(bool casts)
      : by_hand(casts),
        embedding(register_module("embedding", torch::nn::Embedding(10, 8))),
        conv(register_module(
            "conv",
            torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 8, 3).padding(1)))),
        batch_norm(register_module("batch_norm", torch::nn::BatchNorm1d(8))),
        norm(register_module(
            "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        attention(
            register_module("attention", torch::nn::MultiheadAttention(8, 2))),
        lstm(register_module("lstm", torch::nn::LSTM(8, 8))),
        head(register_module("head", torch::nn::Linear(8, 4))) {
    to(at::kBFloat16);
    norm->to(at::kFloat);
    batch_norm->to(at::kFloat);
  }
  at::Tensor In(const at::Tensor& t, at::ScalarType dtype) const {
    return by_hand ? t.to(dtype) : t;
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& signal) {
    at::Tensor h = conv(In(signal, at::kBFloat16));
    h = In(batch_norm(In(h, at::kFloat)), at::kBFloat16).transpose(1, 2);
    h = h + embedding(tokens);
    h = h + In(norm(In(h, at::kFloat)), at::kBFloat16);
    h = std::get<0>(attention(h, h, h));
    const at::Tensor s = In(torch::zeros({1, h.size(1), 8}), at::kBFloat16);
    h = std::get<0>(lstm(h, std::make_tuple(s, s)));
    return head(In(h * torch::ones({1}), at::kBFloat16));  // float32: promoted
  }

  const bool by_hand;
  torch::nn::Embedding embedding;
  torch::nn::Conv1d conv;
  torch::nn::BatchNorm1d batch_norm;
  torch::nn::LayerNorm norm;
  torch::nn::MultiheadAttention attention;
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};
TORCH_MODULE(Mixed);

TEST_F(TaggedStorageTest, NetworkOfMixedDtypes) {
  auto build = [](bool by_hand) {
    torch::manual_seed(7);
    return Mixed(by_hand);
  };
  auto plain = build(true), tagged = build(false);
  const at::Tensor tokens = torch::randint(10, {2, 6});
  const at::Tensor signal = torch::randn({2, 3, 6});
  auto loss = [&](Mixed& m) {
    return m(tokens, signal).to(at::kFloat).pow(2).mean();
  };
  at::Tensor expected, got;
  {
    PlainAutograd plain_autograd;
    expected = loss(plain);
    expected.backward();
  }
  {
    Owner owner(tagged->parameters());
    got = loss(tagged);
    got.backward();
  }
  EXPECT_TRUE(SameBits(expected, got));
  const auto parameters = tagged->named_parameters();
  for (const auto& p : plain->named_parameters()) {
    EXPECT_TRUE(SameBits(p.value().grad(), parameters[p.key()].grad()))
        << p.key();
  }
  const auto buffers = tagged->named_buffers();
  for (const auto& b : plain->named_buffers()) {
    EXPECT_TRUE(SameBits(b.value(), buffers[b.key()])) << b.key();
  }
}

// ---- running statistics that are parameters

struct StatisticsImpl : torch::nn::Module {
  StatisticsImpl()
      : in(register_module("in", torch::nn::Linear(8, 8))),
        mean(register_parameter("mean", torch::zeros({6}), false)),
        var(register_parameter("var", torch::ones({6}), false)) {}

  torch::nn::Linear in;
  at::Tensor mean, var;
};
TORCH_MODULE(Statistics);

struct StatisticsCase {
  std::string name;
  std::function<at::Tensor(Statistics&, const at::Tensor& x, bool training)>
      norm;
};

class StatisticsOf : public TaggedStorageTest,
                     public ::testing::WithParamInterface<StatisticsCase> {};

INSTANTIATE_TEST_SUITE_P(
    TaggedStorageTest, StatisticsOf,
    ::testing::Values(
        StatisticsCase{"BatchNorm",
                       [](Statistics& m, const at::Tensor& x, bool training) {
                         return torch::batch_norm(x, {}, {}, m->mean, m->var,
                                                  training, 0.1, 1e-5, false);
                       }},
        StatisticsCase{"NativeBatchNorm",
                       [](Statistics& m, const at::Tensor& x, bool training) {
                         return std::get<0>(torch::native_batch_norm(
                             x, {}, {}, m->mean, m->var, training, 0.1, 1e-5));
                       }},
        StatisticsCase{"NativeBatchNormLegit",
                       [](Statistics& m, const at::Tensor& x, bool training) {
                         return std::get<0>(torch::_native_batch_norm_legit(
                             x, {}, {}, m->mean, m->var, training, 0.1, 1e-5));
                       }},
        StatisticsCase{"InstanceNorm",
                       [](Statistics& m, const at::Tensor& x, bool training) {
                         return torch::instance_norm(x, {}, {}, m->mean, m->var,
                                                     training, 0.1, 1e-5,
                                                     false);
                       }}),
    [](const auto& info) { return info.param.name; });

TEST_P(StatisticsOf, ParametersAreKept) {
  Twins<Statistics> t([] { return Statistics(); });
  t.Create();
  const at::Tensor x = torch::randn({4, 6, 8});
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      return MeanSquare(GetParam().norm(m, torch::tanh(m->in(x)), true));
    });
  }
  EXPECT_FALSE(SameBits(t.plain->mean, torch::zeros({6})));
  t.Train([&](auto& m) {
    return MeanSquare(GetParam().norm(m, torch::tanh(m->in(x)), false));
  });
}

}  // namespace
}  // namespace tessera
