// Inputs in another dtype than the parameters of their operator, which a unit
// owns: the fallback casts them, and what comes out is to the bit what casts by
// hand give in plain libtorch.
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/dispatch/autocast_scope.h"
#include "tests/dispatch/owned_tensors.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class InputsOf : public TaggedStorageTest,
                 public ::testing::WithParamInterface<OperatorCase> {};

const std::vector<OperatorCase>& Products() {
  static const auto* cases = new std::vector<OperatorCase>{
      {"Linear",
       {{6, 8}, {6}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::linear(x[0], w[0], w[1]))},
      {"Matmul", {{8, 6}}, {{2, 4, 8}}, TESSERA_OF_W_X(x[0].matmul(w[0]))},
      {"Mm", {{8, 6}}, {{4, 8}}, TESSERA_OF_W_X(x[0].mm(w[0]))},
      {"MmOfAView",
       {{6, 8}},
       {{4, 6}},
       TESSERA_OF_W_X(x[0].narrow(1, 0, 4).mm(w[0].t().narrow(0, 2, 4)))},
      {"Bmm", {{2, 8, 6}}, {{2, 4, 8}}, TESSERA_OF_W_X(x[0].bmm(w[0]))},
      {"Mv", {{8}}, {{4, 8}}, TESSERA_OF_W_X(x[0].mv(w[0]))},
      {"Addmm",
       {{6}},
       {{4, 8}, {8, 6}},
       TESSERA_OF_W_X(torch::addmm(w[0], x[0], x[1], 0.5, 2))},
      {"Addmv",
       {{4, 8}},
       {{4}, {8}},
       TESSERA_OF_W_X(torch::addmv(x[0], w[0], x[1]))},
      {"Addbmm",
       {{2, 4, 8}},
       {{4, 6}, {2, 8, 6}},
       TESSERA_OF_W_X(torch::addbmm(x[0], w[0], x[1]))},
      {"Baddbmm",
       {{2, 4, 8}},
       {{2, 4, 6}, {2, 8, 6}},
       TESSERA_OF_W_X(torch::baddbmm(x[0], w[0], x[1]))},
      {"Dot", {{8}}, {{8}}, TESSERA_OF_W_X(x[0].dot(w[0]))},
      {"Vdot", {{8}}, {{8}}, TESSERA_OF_W_X(x[0].vdot(w[0]))},
      {"Inner", {{4, 8}}, {{3, 8}}, TESSERA_OF_W_X(torch::inner(x[0], w[0]))},
      {"Vecdot",
       {{4, 8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::linalg_vecdot(x[0], w[0]))},
      {"LinalgMatmul",
       {{8, 6}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::linalg_matmul(x[0], w[0]))},
      {"Tensordot",
       {{8, 6}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::tensordot(x[0], w[0], {1}, {0}))},
      {"Einsum",
       {{6, 8}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::einsum("bij,kj->bik", {x[0], w[0]}))},
      {"MultiDot",
       {{8, 6}},
       {{4, 8}, {6, 3}},
       TESSERA_OF_W_X(torch::linalg_multi_dot({x[0], w[0], x[1]}))},
      {"ChainMatmul",
       {{8, 6}},
       {{4, 8}, {6, 3}},
       TESSERA_OF_W_X(torch::chain_matmul({x[0], w[0], x[1]}))},
      {"Bilinear",
       {{5, 8, 6}, {5}},
       {{4, 8}, {4, 6}},
       TESSERA_OF_W_X(torch::bilinear(x[0], x[1], w[0], w[1]))},
      {"Lerp",
       {{8}},
       {{4, 8}, {4, 8}},
       TESSERA_OF_W_X(torch::lerp(x[0], x[1], w[0]))},
      {"Attention",
       {{1, 2, 5, 8}},
       {{1, 2, 4, 8}, {1, 2, 5, 8}, {4, 5}},
       TESSERA_OF_W_X(
           torch::scaled_dot_product_attention(x[0], w[0], x[1], x[2]))}};
  return *cases;
}

const std::vector<OperatorCase>& Layers() {
  static const auto* cases = new std::vector<OperatorCase>{
      {"Conv1d",
       {{6, 4, 3}, {6}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::conv1d(x[0], w[0], w[1]))},
      {"Conv2d",
       {{6, 4, 3, 3}, {6}},
       {{2, 4, 8, 8}},
       TESSERA_OF_W_X(torch::conv2d(x[0], w[0], w[1], 1, "same"))},
      {"Conv3d",
       {{6, 4, 3, 3, 3}},
       {{2, 4, 5, 5, 5}},
       TESSERA_OF_W_X(torch::conv3d(x[0], w[0]))},
      {"ConvTbc",
       {{3, 4, 6}, {6}},
       {{8, 2, 4}},
       TESSERA_OF_W_X(torch::conv_tbc(x[0], w[0], w[1], 1))},
      {"ConvTranspose1d",
       {{4, 6, 3}, {6}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::conv_transpose1d(x[0], w[0], w[1]))},
      {"ConvTranspose2d",
       {{4, 6, 3, 3}, {6}},
       {{2, 4, 5, 5}},
       TESSERA_OF_W_X(torch::conv_transpose2d(x[0], w[0], w[1]))},
      {"ConvTranspose3d",
       {{4, 6, 3, 3, 3}, {6}},
       {{2, 4, 5, 5, 5}},
       TESSERA_OF_W_X(torch::conv_transpose3d(x[0], w[0], w[1]))},
      {"Convolution",
       {{6, 4, 3}, {6}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(
           torch::convolution(x[0], w[0], w[1], {1}, {0}, {1}, false, {0}, 1))},
      {"UnderscoreConvolution",
       {{6, 4, 3}, {6}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(at::_convolution(x[0], w[0], w[1], {1}, {0}, {1}, false,
                                       {0}, 1, false, false, true, true))},
      {"Lstm",
       {{32, 8}, {32, 8}, {32}, {32}},
       {{5, 2, 8}, {1, 2, 8}, {1, 2, 8}},
       TESSERA_OF_W_X(
           torch::lstm(x[0], {x[1], x[2]}, w, true, 1, 0, true, false, false))},
      {"Gru",
       {{24, 8}, {24, 8}, {24}, {24}},
       {{5, 2, 8}, {1, 2, 8}},
       TESSERA_OF_W_X(
           torch::gru(x[0], x[1], w, true, 1, 0, true, false, false))},
      {"RnnTanh",
       {{8, 8}, {8, 8}, {8}, {8}},
       {{5, 2, 8}, {1, 2, 8}},
       TESSERA_OF_W_X(
           torch::rnn_tanh(x[0], x[1], w, true, 1, 0, true, false, false))},
      {"RnnRelu",
       {{8, 8}, {8, 8}, {8}, {8}},
       {{5, 2, 8}, {1, 2, 8}},
       TESSERA_OF_W_X(
           torch::rnn_relu(x[0], x[1], w, true, 1, 0, true, false, false))},
      {"LstmCell",
       {{32, 8}, {32, 8}, {32}, {32}},
       {{2, 8}, {2, 8}, {2, 8}},
       TESSERA_OF_W_X(
           torch::lstm_cell(x[0], {x[1], x[2]}, w[0], w[1], w[2], w[3]))},
      {"GruCell",
       {{24, 8}, {24, 8}, {24}, {24}},
       {{2, 8}, {2, 8}},
       TESSERA_OF_W_X(torch::gru_cell(x[0], x[1], w[0], w[1], w[2], w[3]))},
      {"RnnTanhCell",
       {{8, 8}, {8, 8}, {8}, {8}},
       {{2, 8}, {2, 8}},
       TESSERA_OF_W_X(
           torch::rnn_tanh_cell(x[0], x[1], w[0], w[1], w[2], w[3]))},
      {"RnnReluCell",
       {{8, 8}, {8, 8}, {8}, {8}},
       {{2, 8}, {2, 8}},
       TESSERA_OF_W_X(
           torch::rnn_relu_cell(x[0], x[1], w[0], w[1], w[2], w[3]))},
      {"Prelu", {{4}}, {{2, 4, 8}}, TESSERA_OF_W_X(torch::prelu(x[0], w[0]))},
      {"EmbeddingBag",
       {{9, 8}},
       {{6}},
       TESSERA_OF_W_X(torch::embedding_bag(w[0], torch::arange(6),
                                           torch::tensor({0, 2}), false, 0,
                                           false, x[0]))},
      {"LayerNorm",
       {{8}, {8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::layer_norm(x[0], {8}, w[0], w[1]))},
      {"GroupNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::group_norm(x[0], 2, w[0], w[1]))},
      {"RmsNorm",
       {{8}},
       {{4, 8}},
       TESSERA_OF_W_X(torch::rms_norm(x[0], {8}, w[0], 1e-5))},
      {"InstanceNorm",
       {{4}, {4}},
       {{2, 4, 8}},
       TESSERA_OF_W_X(torch::instance_norm(x[0], w[0], w[1], {}, {}, true, 0.1,
                                           1e-5, false))}};
  return *cases;
}

INSTANTIATE_TEST_SUITE_P(Products, InputsOf, ::testing::ValuesIn(Products()),
                         CaseNameOf);
INSTANTIATE_TEST_SUITE_P(Layers, InputsOf, ::testing::ValuesIn(Layers()),
                         CaseNameOf);

TEST_P(InputsOf, BecomeTheParametersDtype) {
  const OperatorCase& c = GetParam();
  auto by_hand = [&](const Tensors& w, const Tensors& x) {
    return c.f(w, To(w[0].scalar_type(), x));
  };
  const std::vector<std::pair<at::ScalarType, at::ScalarType>> dtypes = {
      {at::kBFloat16, at::kFloat},
      {at::kBFloat16, at::kDouble},
      {at::kBFloat16, at::kHalf},
      {at::kBFloat16, at::kBFloat16}};
  for (const auto& [parameters, inputs] : dtypes) {
    SCOPED_TRACE(c10::toString(inputs));
    ExpectSame(by_hand, c.f, Random(c.parameters, parameters),
               Random(c.inputs, inputs));
  }
}

// Unless it is asked for: the words of plain libtorch, or its own promotion.
TEST_P(InputsOf, AreLeftAloneOtherwise) {
  const OperatorCase& c = GetParam();
  const Tensors w = Random(c.parameters, at::kBFloat16);
  const Tensors x = Random(c.inputs, at::kFloat);
  auto result = [&] {
    return CatchTorch("forward", [&] { c.f(w, x); }).ToString();
  };
  const std::string expected = result();
  Owner owner(w, /*cast_inputs=*/false);
  EXPECT_EQ(result(), expected);
}

TEST_F(TaggedStorageTest, InputCastsFollowTheGradMode) {
  const Tensors w = Random({{6, 8}}, at::kBFloat16);
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  at::Tensor expected;
  {
    torch::NoGradGuard no_grad;
    expected = torch::linear(x.to(at::kBFloat16), w[0]);
  }
  Owner owner(w);
  {
    torch::NoGradGuard no_grad;
    const at::Tensor y = torch::linear(x, w[0]);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(SameBits(expected, y));
  }
  c10::InferenceMode inference;
  EXPECT_TRUE(SameBits(expected, torch::linear(x, w[0])));
}

TEST_F(TaggedStorageTest, InputCastsLeaveGivenResultsAlone) {
  const Tensors w = Random({{8, 6}}, at::kBFloat16);
  const at::Tensor x = torch::randn({4, 8});
  torch::NoGradGuard no_grad;
  const at::Tensor expected = x.to(at::kBFloat16).mm(w[0]);
  at::Tensor out = torch::zeros({4, 6}).to(at::kBFloat16);
  at::Tensor wrong = torch::zeros({4, 6});
  Owner owner(w);
  torch::mm_out(out, x, w[0]);
  EXPECT_TRUE(SameBits(expected, out));
  EXPECT_THAT(CatchTorch("mm", [&] { torch::mm_out(wrong, x, w[0]); }),
              FailsWith(HasSubstr("type")));
}

// It is not said which of them the inputs should follow.
TEST_F(TaggedStorageTest, InputsOfParametersOfTwoDtypesAreLeftAlone) {
  const at::Tensor x = torch::randn({4, 8}, at::kDouble);
  const at::Tensor w = Random({{3, 8, 8}}, at::kBFloat16)[0];
  const at::Tensor b = Random({{3}}, at::kFloat)[0];
  auto words = [&] {
    return CatchTorch("bilinear", [&] { torch::bilinear(x, x, w, b); })
        .ToString();
  };
  const std::string expected = words();
  EXPECT_THAT(expected, HasSubstr("same dtype, got input1: double"));
  Owner owner({w, b});
  EXPECT_EQ(words(), expected);
}

// Autocast has the first word where it has one: an input is not rounded twice.
TEST_F(TaggedStorageTest, InputCastsUnderAutocast) {
  for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    auto f = [&](const Tensors& w, const at::Tensor& a, const at::Tensor& b) {
      LocalAutocast autocast(/*cache=*/true, /*on=*/true, dtype);
      return torch::bilinear(torch::linear(a, w[0], w[1]), b, w[2], w[3]);
    };
    auto by_hand = [&](const Tensors& w, const Tensors& x) {
      LocalAutocast autocast(/*cache=*/true, /*on=*/true, dtype);
      const at::Tensor h = torch::linear(x[0], w[0], w[1]);
      return torch::bilinear(h.to(at::kBFloat16), x[1].to(at::kBFloat16), w[2],
                             w[3]);
    };
    ExpectSame(
        by_hand, [&](auto& w, auto& x) { return f(w, x[0], x[1]); },
        Random({{8, 8}, {8}, {3, 8, 8}, {3}}, at::kBFloat16),
        Random({{4, 8}, {4, 8}}, at::kFloat));
  }
}

}  // namespace
}  // namespace tessera
