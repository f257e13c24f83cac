#include "examples/llama/llama.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/record_function.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::ElementsAre;

LlamaOptions Small() {
  return LlamaOptions().dim(16).layers(2).heads(4).kv_heads(2).hidden(24).vocab(
      11);
}

Llama SmallLlama(uint64_t seed) {
  at::manual_seed(seed);
  return Llama(Small());
}

at::Tensor RandomTokens(int64_t batch, int64_t length) {
  return at::randint(0, 11, {batch, length}, at::kLong);
}

// The logits are those of transformers 5.23 for the same parameters. They
// depend on which numbers of a head turn together, which heads share a key, and
// the place of eps.
TEST(LlamaTest, GivesTheLogitsOfTransformers) {
  c10::NoGradGuard no_grad;
  Llama model(Small().rope(RopeOptions().theta(50)).norm_eps(0.05));
  double number = 0;
  for (auto& parameter : model->parameters()) {
    const auto index = at::arange(parameter.numel(), at::kDouble);
    auto values = (index.pow(1.5) * 0.7 + number++).sin() * 0.5;
    if (parameter.dim() == 1) values = values + 1;
    parameter.copy_(values.view(parameter.sizes()));
  }
  const auto expected =
      at::tensor({0.416588873f, -2.261970997f, -3.015937805f, -0.378086686f,
                  -1.506497145f, -1.295050621f, 2.891668797f, -0.694873214f,
                  -0.243315339f, 2.618119240f, 1.333200097f});
  const auto tokens =
      at::tensor({3, 1, 4, 1, 5, 9, 2, 6}, at::kLong).unsqueeze(0);
  const auto got = model->forward(tokens)[0][7];
  // A logit is made by sums of 280 products, one after the other: two layers of
  // 5 x 16 (projections, norms), 24 (down), 4 and 2 x 8 (attention), and
  // 2 x 16. Each is off by at most half an eps of the largest in all orders of
  // summing; twice that is far from what they come to.
  const double bound = 280 * std::numeric_limits<float>::epsilon() *
                       expected.abs().max().item<double>();
  const double far = (got - expected).abs().max().item<double>();
  EXPECT_LE(far, bound) << far / bound * 100 << "% of the bound; " << got;
}

TEST(LlamaTest, NamesAreThoseOfTransformers) {
  std::vector<std::string> names;
  for (const auto& item :
       Llama(Small().layers(1).tied(true))->named_parameters()) {
    names.push_back(item.key());
  }
  EXPECT_THAT(names,
              ElementsAre("model.embed_tokens.weight",
                          "model.layers.0.self_attn.q_proj.weight",
                          "model.layers.0.self_attn.k_proj.weight",
                          "model.layers.0.self_attn.v_proj.weight",
                          "model.layers.0.self_attn.o_proj.weight",
                          "model.layers.0.mlp.gate_proj.weight",
                          "model.layers.0.mlp.up_proj.weight",
                          "model.layers.0.mlp.down_proj.weight",
                          "model.layers.0.input_layernorm.weight",
                          "model.layers.0.post_attention_layernorm.weight",
                          "model.norm.weight"));
  EXPECT_TRUE(SmallLlama(0)->named_parameters().contains("lm_head.weight"));
}

TEST(LlamaTest, LossStartsAtThatOfAUniformGuess) {
  const auto loss =
      SmallLlama(0)->loss(RandomTokens(8, 16), RandomTokens(8, 16));
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_NEAR(loss.item<double>(), std::log(11.0), 0.1);
}

TEST(LlamaTest, TheLossIsFloat32InAnyPrecision) {
  Llama model = SmallLlama(0);
  model->to(at::kBFloat16);
  EXPECT_EQ(model->loss(RandomTokens(2, 16), RandomTokens(2, 16)).scalar_type(),
            at::kFloat);
}

TEST(LlamaTest, EveryParameterGetsAGradient) {
  for (const bool tied : {false, true}) {
    Llama model(Small().tied(tied));
    model->loss(RandomTokens(2, 16), RandomTokens(2, 16)).backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0)
          << item.key();
    }
  }
}

TEST(LlamaTest, LaterTokensDoNotChangeEarlierLogits) {
  Llama model = SmallLlama(0);
  auto tokens = RandomTokens(1, 16);
  const auto before = model->forward(tokens);
  tokens[0][15] = (tokens[0][15] + 1) % 11;
  const auto after = model->forward(tokens);
  EXPECT_TRUE(at::equal(before.slice(1, 0, 15), after.slice(1, 0, 15)));
  EXPECT_FALSE(at::equal(before.slice(1, 15), after.slice(1, 15)));
}

// Counts the calls of aten::cos on this thread while it lives.
class CosCount {
 public:
  CosCount() {
    calls_ = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          if (std::string(function.name()) == "aten::cos") ++calls_;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CosCount() { at::removeCallback(handle_); }
  int calls() const { return calls_; }

 private:
  static thread_local int calls_;
  at::CallbackHandle handle_;
};
thread_local int CosCount::calls_ = 0;

TEST(LlamaTest, TablesOfPositionsAreKept) {
  Llama model = SmallLlama(0), other = SmallLlama(0);
  const at::Tensor tokens = RandomTokens(2, 16);
  const at::Tensor first = model->forward(tokens);
  const CosCount count;
  EXPECT_TRUE(at::equal(model->forward(tokens), first));
  EXPECT_EQ(count.calls(), 0);
  // Those for another length, and in another precision, are others.
  const at::Tensor shorter = tokens.slice(1, 0, 7);
  EXPECT_TRUE(at::equal(model->forward(shorter), other->forward(shorter)));
  EXPECT_EQ(count.calls(), 2);
  model->to(at::kDouble);
  other = SmallLlama(0);
  other->to(at::kDouble);
  EXPECT_TRUE(at::equal(model->forward(shorter), other->forward(shorter)));
  EXPECT_EQ(count.calls(), 4);
}

TEST(LlamaTest, TablesOfAnEvaluationServeATraining) {
  Llama model = SmallLlama(0);
  const at::Tensor tokens = RandomTokens(2, 16);
  {
    const c10::InferenceMode inference;
    model->forward(tokens);
  }
  model->loss(tokens, tokens).backward();
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

TEST(LlamaTest, RefusesSizesThatDoNotFit) {
  EXPECT_THROW(Llama(Small().heads(3)), c10::Error);
  EXPECT_THROW(Llama(Small().dim(12)), c10::Error);  // heads of 3 numbers
  EXPECT_THROW(Llama(Small().kv_heads(3)), c10::Error);
}

}  // namespace
