#include "testing/device/test_device.h"

#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace testdevice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = Fault::Kind;

auto FaultOf(Kind kind) { return Field(&Fault::kind, kind); }

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}
c10::Stream FromPool(int device) {
  return Impl().getStreamFromGlobalPool(TestDevice(device));
}
c10::Stream Current(int device) { return Impl().getStream(TestDevice(device)); }

// `second` waits for what `first` has by now.
void Wait(c10::Stream first, c10::Stream second) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(first);
  event.block(second);
}

class TestDeviceTest : public ::testing::TestWithParam<Mode> {
 protected:
  static void SetUpTestSuite() { Register({}); }
  void SetUp() override {
    SetMode(GetParam(), 1);
    ClearFaults();
    ResetHostWaits();
  }
  void TearDown() override { SetMode(Mode::kAtOnce); }
  // NaN where a worker would have come too late.
  static bool HasBits(const at::Tensor& of_device, const at::Tensor& expected) {
    const at::Tensor got = of_device.cpu();
    return got.sizes().equals(expected.sizes()) &&
           std::memcmp(got.const_data_ptr(), expected.const_data_ptr(),
                       got.nbytes()) == 0;
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, TestDeviceTest,
                         ::testing::Values(Mode::kAtOnce, Mode::kWorkers),
                         [](const auto& info) {
                           return info.param == Mode::kAtOnce ? "AtOnce"
                                                              : "Workers";
                         });

// ---- operators

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

// ---- order

TEST_P(TestDeviceTest, AMissingWaitIsFound) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  {
    const c10::StreamGuard guard(side);
    const at::Tensor y = x + 1;
    ASSERT_THAT(Faults(), Not(IsEmpty()));
    EXPECT_THAT(
        Faults()[0],
        AllOf(FaultOf(Kind::kReadTooEarly),
              Field(&Fault::message,
                    AllOf(HasSubstr("aten::add"), HasSubstr("aten::fill_"),
                          HasSubstr("its argument self Float [100]"),
                          HasSubstr("the default stream of device 1"),
                          HasSubstr("stream ")))));
  }
}

TEST_P(TestDeviceTest, WhatAnOperatorReturnsIsWritten) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  Wait(Current(1), side);
  const at::Tensor y = at::layer_norm(x, {100});  // has no out= of its own
  EXPECT_THAT(Faults(), IsEmpty());
  const c10::StreamGuard guard(side);
  const at::Tensor z = y * 2;
  ASSERT_THAT(Faults(), Not(IsEmpty()));
  EXPECT_THAT(Faults()[0].message,
              HasSubstr("wait for aten::native_layer_norm on the default"));
}

TEST_P(TestDeviceTest, AWaitIsEnough) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  Wait(Current(1), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  Wait(side, Current(1));
  EXPECT_TRUE(HasBits(y + x, at::full({100}, 3.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, FreedTooEarlyIsFound) {
  const c10::Stream side = FromPool(0);
  at::Tensor x = at::ones({100}, TestDevice(0));
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  x.reset();
  at::empty({7}, TestDevice(0));
  EXPECT_THAT(Faults(), ElementsAre(FaultOf(Kind::kReusedTooEarly)));
}

TEST_P(TestDeviceTest, RecordStreamKeepsMemory) {
  const c10::Stream side = FromPool(0);
  at::Tensor x = at::ones({100}, TestDevice(0));
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
    x.record_stream(side);
  }
  x.reset();
  for (int i = 0; i < 10; ++i) at::zeros({100}, TestDevice(0));
  Wait(side, Current(0));
  EXPECT_TRUE(HasBits(y, at::full({100}, 2.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, WhatIsNoOperator) {
  const c10::Stream side = FromPool(0);
  const at::Tensor x = at::ones({100}, TestDevice(0));
  float* const data = x.mutable_data_ptr<float>();
  const std::vector<Region> regions = {
      {data, static_cast<int64_t>(x.nbytes()), true}};
  const auto work = [data] { OnHost(data)[3] = 5; };
  Launch(side, "kernel", regions, work);
  ASSERT_THAT(Faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
  EXPECT_THAT(Faults()[0].message, HasSubstr("kernel on stream"));
  ClearFaults();
  Wait(Current(0), side);
  Launch(side, "kernel", regions, work);
  Wait(side, Current(0));
  EXPECT_EQ(5, x[3].item<float>());
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, TensorsOfTwoDevicesAreFound) {
  // Allocated by device 0, although it is said to be of device 1.
  c10::DataPtr memory =
      c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(64);
  memory.unsafe_set_device(TestDevice(1));
  const at::Tensor x = at::empty({0}, TestDevice(1));
  x.storage().set_data_ptr_noswap(std::move(memory));
  x.storage().set_nbytes(64);
  x.unsafeGetTensorImpl()->set_sizes_contiguous({16});
  x.fill_(1);
  ASSERT_THAT(Faults(), Not(IsEmpty()));
  EXPECT_THAT(Faults()[0], FaultOf(Kind::kOtherDevice));
}

// ---- the host

TEST_P(TestDeviceTest, BlockingCopiesAndValuesWaitAndAreCounted) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  EXPECT_EQ(0, CountHostWaits());
  EXPECT_EQ(3, x.sum().item<float>());
  EXPECT_EQ(1, CountHostWaits());
  x.cpu();
  EXPECT_EQ(2, CountHostWaits());
  at::ones({3}).to(TestDevice(0));
  EXPECT_EQ(3, CountHostWaits());
  Current(0).synchronize();
  EXPECT_EQ(4, CountHostWaits());
  EXPECT_THAT(HostWaits(), ::testing::Contains(
                               Field(&HostWaited::what, "synchronize stream")));
}

TEST_P(TestDeviceTest, CopiesToPinnedMemoryDoNotWait) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  const at::Tensor pinned =
      at::zeros({3}, at::TensorOptions().pinned_memory(true));
  ASSERT_TRUE(pinned.is_pinned());
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(0, CountHostWaits());
  const Region all = {pinned.const_data_ptr(), 12, false};
  NoteHostAccess("print", all);
  EXPECT_THAT(Faults(), ElementsAre(FaultOf(Kind::kHostAccessTooEarly)));
  ClearFaults();
  Current(0).synchronize();
  NoteHostAccess("print", all);
  EXPECT_THAT(Faults(), IsEmpty());
  EXPECT_TRUE(at::equal(pinned, at::ones({3})));
}

TEST_P(TestDeviceTest, ACopyBetweenDevicesIsOrderedOnBoth) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  const at::Tensor y = x.to(TestDevice(1));
  EXPECT_TRUE(HasBits(y + 1, at::full({3}, 2.f)));
  EXPECT_THAT(Faults(), IsEmpty());
  EXPECT_EQ(1, CountHostWaits());  // HasBits
}

using TestDeviceDeathTest = TestDeviceTest;
INSTANTIATE_TEST_SUITE_P(Modes, TestDeviceDeathTest,
                         ::testing::Values(Mode::kAtOnce));

TEST_P(TestDeviceDeathTest, TheHostCannotFollowADevicesPointer) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  EXPECT_DEATH(
      {
        volatile const float value = *x.const_data_ptr<float>();
        (void)value;
      },
      "");
}

// ---- memory

TEST_P(TestDeviceTest, CountsAndLimitsMemory) {
  auto* const allocator = c10::getDeviceAllocator(c10::DeviceType::PrivateUse1);
  allocator->resetPeakStats(1);
  const int64_t before =
      allocator->getDeviceStats(1).allocated_bytes[0].current;
  { const at::Tensor x = at::zeros({1024}, TestDevice(1)); }
  EXPECT_EQ(before, allocator->getDeviceStats(1).allocated_bytes[0].current);
  EXPECT_EQ(before + 4096,
            allocator->getDeviceStats(1).allocated_bytes[0].peak);
  SetMemoryLimit(1, before + 1000);
  EXPECT_THROW(at::zeros({1024}, TestDevice(1)), c10::OutOfMemoryError);
  SetMemoryLimit(1, INT64_MAX);
}

TEST_P(TestDeviceTest, NewMemoryIsPoisoned) {
  EXPECT_TRUE(at::empty({9}, TestDevice(0)).isnan().all().item<bool>());
}

using WorkersTest = TestDeviceTest;
INSTANTIATE_TEST_SUITE_P(Modes, WorkersTest, ::testing::Values(Mode::kWorkers));

// Without its wait a worker comes too late or too early: the bits are wrong,
// not only the order. Many tries, for a delay is drawn for one task in four.
TEST_P(WorkersTest, ShowAMissingWaitInTheBits) {
  int wrong = 0;
  for (int i = 0; i < 50; ++i) {
    const c10::Stream side = FromPool(0);
    const at::Tensor x = at::ones({100}, TestDevice(0));
    const c10::StreamGuard guard(side);
    wrong += HasBits(x + 1, at::full({100}, 2.f)) ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
  EXPECT_THAT(Faults(), Not(IsEmpty()));
}

TEST_P(TestDeviceTest, AutogradOrdersItsStreams) {
  const c10::Stream side = FromPool(0);
  at::Tensor w = at::ones({8}, TestDevice(0)).requires_grad_(true);
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = (w * w).sum();
  }
  Wait(side, Current(0));
  (y * 2).backward();
  EXPECT_TRUE(HasBits(w.grad(), at::full({8}, 4.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

}  // namespace
}  // namespace testdevice
