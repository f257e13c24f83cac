// What libtorch refuses is refused by a trace, too, which names the operator
// and the module.
#include "sharding/trace/operators/shape_checks.h"

#include <torch/torch.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "base/torch_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/trace/trace.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::HasSubstr;

struct Layer : torch::nn::Module {
  explicit Layer(at::IntArrayRef sizes)
      : weight(register_parameter("weight", torch::rand(sizes))) {}
  const Tensor weight;
};
struct Model : torch::nn::Module {
  explicit Model(at::IntArrayRef sizes)
      : layer(register_module("layer", std::make_shared<Layer>(sizes))) {}
  const std::shared_ptr<Layer> layer;
};

struct Wrong {
  const char* name;
  std::vector<int64_t> weight;
  std::function<Tensor(const Tensor& weight)> run;
  const char* op;
  const char* message;  // of both
};

// Too large to be computed.
Tensor Image(int64_t channels, int64_t size = 64) {
  return torch::rand({16, channels, size, size});
}

void PrintTo(const Wrong& wrong, std::ostream* out) { *out << wrong.name; }

const std::vector<Wrong>& Wrongs() {
  static const auto* const wrongs = new std::vector<Wrong>{
      {"Channels",
       {6, 3, 3, 3},
       [](const Tensor& w) { return at::conv2d(Image(4), w); },
       "aten::convolution",
       "to have 3 channels, but got 4 channels instead"},
      {"Stride",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::conv2d(Image(3), w, {}, /*stride=*/at::IntArrayRef{0, 1});
       },
       "aten::convolution",
       "non-positive stride is not supported"},
      {"Strides",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::conv2d(Image(3), w, {}, at::IntArrayRef{1, 1, 1});
       },
       "aten::convolution",
       "expected stride to be a single integer value or a list"},
      {"Padding",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::conv2d(Image(3), w, {}, at::IntArrayRef{1},
                           at::IntArrayRef{-1});
       },
       "aten::convolution",
       "negative padding is not supported"},
      {"Dilation",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::conv2d(Image(3), w, {}, at::IntArrayRef{1},
                           at::IntArrayRef{0}, at::IntArrayRef{0});
       },
       "aten::convolution",
       "non-positive dilation is not supported"},
      {"Kernel",
       {6, 3, 65, 65},
       [](const Tensor& w) { return at::conv2d(Image(3), w); },
       "aten::convolution",
       "Kernel size can't be greater than actual input size"},
      {"Bias",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::conv2d(Image(3), w, torch::zeros({5}));
       },
       "aten::convolution",
       "expected bias to be 1-dimensional with 6 elements"},
      {"Groups",
       {6, 1, 3, 3},
       [](const Tensor& w) {
         return at::convolution(Image(4), w, {}, {1, 1}, {0, 0}, {1, 1}, false,
                                {0, 0}, /*groups=*/4);
       },
       "aten::convolution",
       "Given groups=4, expected weight to be divisible"},
      {"Rank",
       {6, 3, 3, 3},
       [](const Tensor& w) {
         return at::convolution(Image(3).unsqueeze(0), w, {}, {1, 1}, {0, 0},
                                {1, 1}, false, {0, 0}, 1);
       },
       "aten::convolution",
       "Expected 4-dimensional input for 4-dimensional weight"},
      {"Transposed",
       {6, 3, 3, 3},
       [](const Tensor& w) { return at::conv_transpose2d(Image(5), w); },
       "aten::convolution",
       "to have 6 channels, but got 5 channels instead"},
      {"LayerNorm",
       {32},
       [](const Tensor& w) { return at::layer_norm(Image(3), {32}, w); },
       "aten::native_layer_norm",
       "expected input with shape [*, 32]"},
      {"LayerNormWeight",
       {32},
       [](const Tensor& w) { return at::layer_norm(Image(3), {64}, w); },
       "aten::native_layer_norm",
       "Expected weight to be of same shape"},
      {"GroupNorm",
       {6},
       [](const Tensor& w) { return at::group_norm(Image(6), 4, w); },
       "aten::group_norm",
       "to be divisible by num_groups"},
      {"GroupNormWeight",
       {5},
       [](const Tensor& w) {
         return std::get<0>(
             at::native_group_norm(Image(6), w, {}, 16, 6, 64 * 64, 3, 1e-5));
       },
       "aten::native_group_norm",
       "Expected weight to be a vector of size equal to the number of "
       "channels"},
      {"BatchNorm",
       {6},
       [](const Tensor& w) {
         return at::batch_norm(Image(6), w, w, torch::zeros({5}),
                               torch::ones({5}), true, 0.1, 1e-5, false);
       },
       "aten::batch_norm",
       "running_mean should contain 6 elements not 5"},
  };
  return *wrongs;
}

class ShapeChecksTest : public ::testing::TestWithParam<Wrong> {};

TEST_P(ShapeChecksTest, IsRefusedAsByLibtorch) {
  const Wrong& wrong = GetParam();
  Model model(wrong.weight);
  const auto loss = [&] { return wrong.run(model.layer->weight).sum(); };
  const absl::Status real = CatchTorch("real", [&] { (void)loss(); });
  EXPECT_THAT(real.ToString(), HasSubstr(wrong.message));
  const absl::Status traced = TakeTrace(model, loss).status();
  EXPECT_EQ(traced.code(), real.code());
  EXPECT_THAT(traced.ToString(), HasSubstr(wrong.message));
  EXPECT_THAT(traced.ToString(),
              HasSubstr(std::string("[layer] ") + wrong.op + ": "));
}

INSTANTIATE_TEST_SUITE_P(All, ShapeChecksTest, ::testing::ValuesIn(Wrongs()),
                         [](const ::testing::TestParamInfo<Wrong>& info) {
                           return info.param.name;
                         });

}  // namespace
}  // namespace tessera
