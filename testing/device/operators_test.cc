// Operators on the device have the CPU's bits.
#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/device_testing.h"
#include "testing/device/test_device.h"

namespace testdevice {
namespace {

using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_P(TestDeviceTest, OperatorsHaveTheCpusBits) {
  const at::Tensor a = torch::randn({33, 17}), b = torch::randn({17, 9});
  const at::Tensor of_a = a.to(TestDevice(1)), of_b = b.to(TestDevice(1));
  EXPECT_TRUE(HasBits(at::mm(of_a, of_b), at::mm(a, b)));
  EXPECT_TRUE(HasBits(of_a.t().contiguous(), a.t().contiguous()));
  EXPECT_TRUE(HasBits(of_a.narrow(1, 3, 5).sum(0), a.narrow(1, 3, 5).sum(0)));
  EXPECT_TRUE(HasBits(at::softmax(of_a, 1) + 2, at::softmax(a, 1) + 2));
  EXPECT_TRUE(HasBits(at::cat({of_a, of_a}, 1), at::cat({a, a}, 1)));
  EXPECT_TRUE(HasBits(std::get<1>(of_a.max(1)), std::get<1>(a.max(1))));
  EXPECT_TRUE(HasBits(of_a.to(at::kBFloat16), a.to(at::kBFloat16)));
  EXPECT_EQ(TestDevice(1), at::mm(of_a, of_b).device());
  EXPECT_THAT(Faults(), IsEmpty());
}

// Composites that ask which device they are on take the CPU's way.
TEST_P(TestDeviceTest, CompositesHaveTheCpusBits) {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<std::pair<const char*, Function>> functions = {
      {"attention",
       [](const at::Tensor& x) {
         return at::scaled_dot_product_attention(x, x, x, {}, 0.0, true);
       }},
      {"layer norm",
       [](const at::Tensor& x) { return at::layer_norm(x, {7}); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"matmul",
       [](const at::Tensor& x) { return at::matmul(x, x.transpose(-1, -2)); }},
      {"mean", [](const at::Tensor& x) { return x.mean(1); }},
      {"softmax", [](const at::Tensor& x) { return at::log_softmax(x, -1); }},
      {"sum", [](const at::Tensor& x) { return x.sum(); }},
      {"dropout",
       [](const at::Tensor& x) { return at::dropout(x, 0.1, true); }},
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = torch::randn({3, 2, 9, 7}).to(dtype);
    for (const auto& [name, function] : functions) {
      torch::manual_seed(4);
      ManualSeed(4);
      at::Tensor on_cpu = x.clone().requires_grad_(true);
      at::Tensor on_device = x.to(TestDevice(1)).requires_grad_(true);
      const at::Tensor expected = function(on_cpu);
      const at::Tensor got = function(on_device);
      EXPECT_TRUE(HasBits(got, expected)) << name << " " << dtype;
      const at::Tensor grad = torch::randn(expected.sizes()).to(dtype);
      expected.backward(grad);
      got.backward(grad.to(TestDevice(1)));
      EXPECT_TRUE(HasBits(on_device.grad(), on_cpu.grad()))
          << name << " backward " << dtype;
    }
  }
}

TEST_P(TestDeviceTest, WritesInPlaceAndThroughViews) {
  at::Tensor x = at::zeros({4, 4}, TestDevice(0));
  x.select(0, 1).fill_(3);
  x.t().select(0, 2).add_(1);
  at::Tensor expected = at::zeros({4, 4});
  expected.select(0, 1).fill_(3);
  expected.t().select(0, 2).add_(1);
  EXPECT_TRUE(HasBits(x, expected));
  at::Tensor out = at::empty({0}, TestDevice(0));
  at::add_out(out, x, x);
  EXPECT_TRUE(HasBits(out, expected + expected));
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, OperatorsWhoseShapesDependOnValuesWait) {
  const at::Tensor x = at::arange(6, TestDevice(0));
  EXPECT_TRUE(HasBits(x.masked_select(x > 3), at::tensor({4L, 5L})));
  EXPECT_THAT(HostWaits(), ::testing::Contains(Field(
                               &HostWaited::what,
                               HasSubstr("sizes of aten::masked_select"))));
}

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv = register_module(
        "conv",
        torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    embedding = register_module("embedding", torch::nn::Embedding(11, 8));
    linear = register_module("linear", torch::nn::Linear(8, 5));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
    at::Tensor y = torch::relu(norm(conv(x))).mean({2, 3});
    y = torch::dropout(y + embedding(ids), 0.3, is_training());
    return torch::nn::functional::cross_entropy(linear(y),
                                                torch::remainder(ids, 5));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(ConvNet);

// Steps of AdamW; parameters and buffers afterwards, on the CPU.
std::vector<at::Tensor> Train(at::Device device) {
  torch::manual_seed(7);
  ManualSeed(7);
  ConvNet net;
  const at::Tensor x = torch::randn({6, 3, 8, 8});
  const at::Tensor ids = torch::randint(11, {6}, at::kLong);
  torch::manual_seed(8);
  ManualSeed(8);
  net->to(device);
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(0.01));
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    net->forward(x.to(device), ids.to(device)).backward();
    optimizer.step();
  }
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : net->parameters()) all.push_back(p.detach().cpu());
  for (const at::Tensor& b : net->buffers()) all.push_back(b.cpu());
  return all;
}

TEST_P(TestDeviceTest, AModelTrainsToTheCpusBits) {
  const std::vector<at::Tensor> expected = Train(at::kCPU);
  const std::vector<at::Tensor> got = Train(TestDevice(1));
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(HasBits(got[i], expected[i])) << i;
  }
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, GeneratorsDrawRepeatThemselvesAndKeepTheirState) {
  ManualSeed(3);
  const at::Tensor first = at::rand({5}, TestDevice(0)).cpu();
  at::Generator generator = at::globalContext().defaultGenerator(TestDevice(0));
  const at::Tensor state = generator.get_state();
  const at::Tensor second = at::rand({5}, TestDevice(0)).cpu();
  generator.set_state(state);
  EXPECT_TRUE(HasBits(at::rand({5}, TestDevice(0)), second));
  EXPECT_FALSE(at::equal(first, second));
}

}  // namespace
}  // namespace testdevice
