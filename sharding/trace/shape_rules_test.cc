// What an operator gives a trace against what it gives: sizes, strides, dtypes
// and bytes, of the operators that have a rule and of some that have a kernel
// of the meta device.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "sharding/trace/tracer.h"

namespace tessera {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

Tensor X(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return torch::rand(sizes).to(dtype);
}
Tensor Numbers(int64_t below, at::IntArrayRef sizes) {
  return torch::randint(below, sizes, torch::kLong);
}
Tensors List(std::tuple<Tensor, Tensor> t) {
  return {std::get<0>(t), std::get<1>(t)};
}
Tensors List(std::tuple<Tensor, Tensor, Tensor, Tensor> t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
}

std::string Describe(const Tensors& tensors) {
  std::ostringstream out;
  for (const Tensor& t : tensors) {
    if (!t.defined()) {
      out << "undefined; ";
      continue;
    }
    out << t.scalar_type() << " " << t.sizes() << " strides " << t.strides()
        << " offset " << t.storage_offset() << " of " << t.storage().nbytes()
        << "; ";
  }
  return out.str();
}

struct Case {
  const char* name;
  std::function<Tensors()> run;
};

Tensors Norms(at::ScalarType dtype, at::ScalarType of_weights) {
  const Tensor x = X({4, 6, 8}, dtype), w = X({8}, of_weights);
  auto [y, mean, rstd] = at::native_layer_norm(x, {8}, w, w, 1e-5);
  auto [dx, dw, db] = at::native_layer_norm_backward(y, x, {8}, mean, rstd, w,
                                                     w, {true, true, true});
  return {y, mean, rstd, dx, dw, db};
}

Tensors GroupNorms(at::MemoryFormat format) {
  const Tensor x = X({2, 6, 4, 4}).contiguous(format), w = X({6});
  auto [y, mean, rstd] = at::native_group_norm(x, w, w, 2, 6, 16, 3, 1e-5);
  auto [dx, dw, db] = at::native_group_norm_backward(y, x, mean, rstd, w, 2, 6,
                                                     16, 3, {true, true, true});
  return {y, mean, rstd, dx, dw, db};
}

Tensors BatchNorms(at::MemoryFormat format, bool training) {
  const Tensor x = X({3, 6, 4, 4}).contiguous(format), w = X({6});
  auto [y, mean, invstd] =
      at::native_batch_norm(x, w, w, w, w, training, 0.1, 1e-5);
  auto [dx, dw, db] = at::native_batch_norm_backward(
      y, x, w, w, w, mean, invstd, training, 1e-5, {true, true, true});
  return {y, mean, invstd, dx, dw, db};
}

Tensors Convolutions(at::MemoryFormat format, int64_t stride, bool transposed) {
  const Tensor x = X({2, 4, 9, 9}).contiguous(format);
  const Tensor w = transposed ? X({4, 3, 3, 3}) : X({6, 4, 3, 3});
  const Tensor y = at::convolution(x, w, Tensor(), {stride, stride}, {1, 1},
                                   {1, 1}, transposed, {0, 0}, 1);
  auto [dx, dw, db] = at::convolution_backward(
      y, x, w, at::IntArrayRef{transposed ? 3 : 6}, {stride, stride}, {1, 1},
      {1, 1}, transposed, {0, 0}, 1, {true, true, true});
  return {y, dx, dw, db};
}

Tensors Attention(at::ScalarType dtype) {
  const Tensor q = X({2, 70, 3, 8}, dtype).transpose(1, 2);
  const Tensor k = X({2, 3, 50, 8}, dtype), v = X({2, 3, 50, 8}, dtype);
  auto [y, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      y, q, k, v, y, sums, 0.0, false);
  return {y, sums, dq, dk, dv};
}

Tensors Bags(int64_t mode, bool last) {
  const Tensor offsets = torch::arange(0, 40, 8, torch::kLong);
  return List(at::_embedding_bag(X({30, 8}), Numbers(30, {40}), offsets, false,
                                 mode, false, {}, last, -1));
}

// One layer and direction of an LSTM, as oneDNN computes it.
Tensors Recurrent(int64_t steps, int64_t batch, int64_t in, int64_t hidden) {
  const at::AutoGradMode training(true);  // or nothing is kept for backward
  const Tensor x = X({steps, batch, in}), h = X({1, batch, hidden});
  const Tensor wi = X({4 * hidden, in}), wh = X({4 * hidden, hidden}),
               b = X({4 * hidden});
  auto [y, hy, cy, kept] =
      at::mkldnn_rnn_layer(x, wi, wh, b, b, h[0], h[0], false, {}, 2, hidden, 1,
                           true, false, false, true);
  auto back = at::mkldnn_rnn_layer_backward(x, wi, wh, b, b, h[0], h[0], y, hy,
                                            cy, y, hy, cy, false, 2, hidden, 1,
                                            true, true, false, {}, false, kept);
  return {y,
          hy,
          cy,
          kept,
          std::get<0>(back),
          std::get<1>(back),
          std::get<2>(back),
          std::get<3>(back),
          std::get<4>(back),
          std::get<5>(back),
          std::get<6>(back)};
}

constexpr auto kPlain = at::MemoryFormat::Contiguous;
constexpr auto kLast = at::MemoryFormat::ChannelsLast;

const std::vector<Case>& Cases() {
  static const auto* const cases = new std::vector<Case>{
      {"LayerNorm", [] { return Norms(at::kFloat, at::kFloat); }},
      {"LayerNormBf16", [] { return Norms(at::kBFloat16, at::kBFloat16); }},
      {"LayerNormMixed", [] { return Norms(at::kBFloat16, at::kFloat); }},
      {"GroupNorm", [] { return GroupNorms(kPlain); }},
      {"GroupNormLast", [] { return GroupNorms(kLast); }},
      {"BatchNorm", [] { return BatchNorms(kPlain, true); }},
      {"BatchNormLast", [] { return BatchNorms(kLast, true); }},
      {"BatchNormEval", [] { return BatchNorms(kPlain, false); }},
      {"Convolution", [] { return Convolutions(kPlain, 1, false); }},
      {"ConvolutionLast", [] { return Convolutions(kLast, 2, false); }},
      {"ConvolutionTransposed", [] { return Convolutions(kPlain, 2, true); }},
      {"Attention", [] { return Attention(at::kFloat); }},
      {"AttentionBf16", [] { return Attention(at::kBFloat16); }},
      {"BagSum", [] { return Bags(0, false); }},
      {"BagMean", [] { return Bags(1, false); }},
      {"BagMax", [] { return Bags(2, false); }},
      {"BagLastOffset", [] { return Bags(0, true); }},
      {"Recurrent", [] { return Recurrent(7, 5, 32, 64); }},
      {"RecurrentOdd", [] { return Recurrent(7, 5, 10, 13); }},
      {"RecurrentLong", [] { return Recurrent(30, 16, 48, 128); }},
      {"EmbeddingBackward",
       [] {
         return Tensors{at::embedding_dense_backward(
             X({5, 3, 8}), Numbers(9, {5, 3}), 9, -1, false)};
       }},
      {"IndexSelect",
       [] {
         return Tensors{at::index_select(X({5, 6, 7}), -2, Numbers(6, {3}))};
       }},
      {"Where",
       [] {
         const Tensor x = X({5, 1, 4}), y = X({3, 4});
         return Tensors{at::where(x > 0.5, x, y), at::where(y > 0.5, y, 1.0)};
       }},
      {"Relu",
       [] {
         const Tensor x = X({2, 3, 4, 4}).contiguous(kLast);
         return Tensors{at::relu(x), at::relu(X({3, 4}).t()),
                        at::relu(X({3, 8}).slice(1, 0, 8, 2))};
       }},
      {"Activations",
       [] {
         const Tensor x = X({4, 6});
         return Tensors{at::hardswish(x),
                        at::hardswish_backward(x, x),
                        at::hardtanh(x),
                        at::hardtanh_backward(x, x, -1, 1),
                        at::glu_backward(X({4, 3}), x, 1),
                        at::logit(x),
                        at::isnan(x),
                        at::_prelu_kernel(x, x),
                        at::softplus(x),
                        at::elu(x),
                        at::leaky_relu(x)};
       }},
      {"LogSigmoid",
       [] {
         const Tensor x = X({4, 6});
         auto [y, buffer] = at::log_sigmoid_forward(x);
         return Tensors{y, buffer, at::log_sigmoid_backward(y, x, buffer)};
       }},
      {"Dropout",
       [] {
         auto [y, mask] = at::native_dropout(X({4, 6}), 0.5, true);
         return Tensors{y, mask, at::native_dropout_backward(y, mask, 2.0)};
       }},
      {"Reductions",
       [] {
         const Tensor x = X({4, 6, 5});
         return Tensors{at::max(x),
                        at::min(x),
                        at::prod(x),
                        at::median(x),
                        at::nansum(x, at::IntArrayRef{1}, true),
                        at::std(x, at::IntArrayRef{0, 2}, 1, false),
                        at::var(x, at::IntArrayRef{1}, 1, true),
                        at::var(x),
                        at::dot(X({5}), X({5})),
                        at::trace(X({3, 3}))};
       }},
      {"VarMean",
       [] {
         return List(at::var_mean(X({4, 6}), at::IntArrayRef{1}));
       }},
      {"Losses",
       [] {
         const Tensor x = X({4, 6});
         return Tensors{at::mse_loss_backward(X({}), x, x, 1),
                        at::huber_loss(x, x),
                        at::huber_loss(x, x, 0),
                        at::binary_cross_entropy(x, x),
                        at::binary_cross_entropy(x, x, {}, 0),
                        at::binary_cross_entropy_backward(X({}), x, x)};
       }},
      {"PixelLoss",
       [] {
         return List(at::nll_loss2d_forward(X({2, 5, 4, 4}),
                                            Numbers(5, {2, 4, 4}), {}, 1, -1));
       }},
      {"Pooling",
       [] {
         const Tensor x = X({2, 3, 9, 9}),
                      y = at::adaptive_avg_pool2d(x, {3, 3});
         return Tensors{y, at::_adaptive_avg_pool2d_backward(y, x),
                        std::get<0>(at::max_pool2d_with_indices(x, 2))};
       }},
      {"PoolingLast",
       [] {
         return Tensors{at::adaptive_avg_pool2d(
             X({2, 3, 9, 9}).contiguous(kLast), {3, 3})};
       }},
      {"WeightNorm",
       [] {
         const Tensor v = X({4, 6}), g = X({4, 1});
         auto [w, norms] = at::_weight_norm_interface(v, g, 0);
         auto [dv, dg] = at::_weight_norm_interface_backward(w, v, g, norms, 0);
         return Tensors{w, norms, dv, dg};
       }},
      {"Rearranged",
       [] {
         const Tensor x = X({4, 6}).t();
         return Tensors{at::flip(x, {0}),   at::roll(x, 2, 0), at::triu(x),
                        at::cat({x, x}, 1), x.clone(),         x.contiguous()};
       }},
      {"Matrices",
       [] {
         const Tensor x = X({4, 6}), y = X({3, 4, 6});
         return Tensors{at::mm(x, x.t()), at::bmm(y, y.transpose(1, 2)),
                        at::addmm(X({4}), x, x.t()),
                        at::linear(y, X({5, 6}), X({5})),
                        at::einsum("bij,bkj->bik", {y, y})};
       }},
      {"Drawn",
       [] {
         return Tensors{at::multinomial(X({4, 6}), 2), at::randperm(100),
                        at::bernoulli(X({4, 6}))};
       }},
      {"Cast",
       [] {
         return Tensors{X({4, 6}).to(at::kBFloat16),
                        X({4, 6}).t().to(at::kDouble), X({4}).to(at::kFloat)};
       }},
      {"FloorDivide",
       [] {
         return Tensors{at::floor_divide(X({4, 1}), X({6}))};
       }},
  };
  return *cases;
}

// What oneDNN keeps of an LSTM that is too large to try.
TEST(ShapeRulesLargeTest, RecurrentIsEstimated) {
  for (const int64_t in : {48, 300}) {
    const auto bytes = [in] {
      return static_cast<double>(Recurrent(30, 16, in, 128)[3].nbytes());
    };
    at::NoGradGuard no_grad;
    const double really = bytes();
    TracerOptions options;
    options.compute_bytes = 0;
    Tracer tracer(options, nullptr);
    Tracer::Scope scope(&tracer);
    EXPECT_NEAR(bytes() / really, 1, 0.02) << in;
  }
}

class ShapeRulesTest : public ::testing::TestWithParam<Case> {};

TEST_P(ShapeRulesTest, GivesWhatTheKernelGives) {
  at::NoGradGuard no_grad;
  const std::string really = Describe(GetParam().run());
  // Nothing is known, and nothing computed where there is a rule.
  TracerOptions options;
  options.known_bytes = 0;
  Tracer tracer(options, nullptr);
  Tensors traced;
  {
    Tracer::Scope scope(&tracer);
    traced = GetParam().run();
  }
  EXPECT_EQ(Describe(traced), really);
}

INSTANTIATE_TEST_SUITE_P(All, ShapeRulesTest, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace tessera
