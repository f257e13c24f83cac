// How many tasks an engine gives to a device in a step beyond those of the
// forward and backward themselves, on a device without hardware. On a GPU each
// is a launch: some 5 us of the host, which hold up a device that is faster.
// And which copies between the two it gives to which stream.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optim/apply_step.h"
#include "testing/device/test_device.h"
#include "tests/equivalence/device_run.h"
#include "tests/support/at_start.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

constexpr int kLayers = 20;
constexpr int64_t kDim = 16;

// Eight parameters, half of them small, as a transformer's layer has.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    norm1 = register_module("norm1", torch::nn::LayerNorm(Normed()));
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    norm2 = register_module("norm2", torch::nn::LayerNorm(Normed()));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
  }
  static torch::nn::LayerNormOptions Normed() {
    return torch::nn::LayerNormOptions({kDim});
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm2(x + down(torch::relu(up(norm1(x)))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Layer);

torch::nn::Sequential Model() {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) model->push_back(Layer());
  return model;
}

using Counts = std::map<std::string, int64_t>;

Counts Since(const Counts& before) {
  Counts counts = testdevice::LaunchCounts();
  for (const auto& [what, times] : before) counts[what] -= times;
  return counts;
}

at::Tensor Loss(torch::nn::Sequential& model) {
  const at::Tensor x = torch::ones(
      {2, kDim},
      at::TensorOptions(at::kBFloat16).device(testdevice::TestDevice(1)));
  return model->forward(x).to(at::kFloat).square().mean();
}

// Forward and backward of the same model without an engine, in bfloat16.
Counts PlainCounts() {
  torch::nn::Sequential model = Model();
  model->to(testdevice::TestDevice(1), at::kBFloat16);
  Counts before;
  for (int step = 0; step < 2; ++step) {
    before = testdevice::LaunchCounts();
    Loss(model).backward();
    model->zero_grad();
  }
  return Since(before);
}

// args: the stage. Returns how many tasks the third step has beyond the plain
// ones, and which.
TESSERA_RANK_FUNCTION(TasksOfAStep) {
  Way way;
  way.stage = std::stoi(std::string(args));
  way.clipping = 0.5;
  way.fp16 = kBf16;
  TESSERA_ASSIGN_OR_RETURN(const auto comm, GroupOf(way, world));
  RegisterTestDeviceKernels();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  torch::nn::Sequential model = Model();
  EngineOptions options;
  options.device = testdevice::TestDevice(1);
  options.communicator = comm;
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model.ptr(), ConfigOf(way), options));
  Counts before;
  for (int step = 0; step < 3; ++step) {
    before = testdevice::LaunchCounts();
    TESSERA_RETURN_IF_ERROR(engine->Backward(Loss(model)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  Counts counts = Since(before);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  for (const auto& [what, times] : PlainCounts()) counts[what] -= times;
  int64_t all = 0;
  std::string lines;
  for (const auto& [what, times] : counts) {
    all += times;
    if (times != 0) absl::StrAppend(&lines, times, " ", what, "\n");
  }
  return absl::StrCat(all, "\n", lines);
}

// Each unit has its gradients, the gaps between them and its update; a step the
// norm's parts, sums and scalars, and what the host is told.
TEST(DeviceLaunchesTest, AStepHasFewOfItsOwn) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto answer =
        RankPool::Get(1)->Run("TasksOfAStep", absl::StrCat(stage))[0];
    TESSERA_ASSERT_OK(answer.status());
    EXPECT_LE(std::stoi(*answer), 3 * kLayers + 10) << stage << "\n" << *answer;
  }
}

constexpr char kToHost[] = "aten::copy_ to the host";
constexpr char kToDevice[] = "aten::copy_ to the device";

// args: a Way. Returns how many copies to the host the third step gives to the
// stream of its kernels, and to others.
TESSERA_RANK_FUNCTION(CopiesToTheHost) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  const at::Device device = run.x.device();
  const c10::Stream kernels =
      c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device);
  int64_t all = 0, own = 0;
  for (int step = 0; step < 3; ++step) {
    all = testdevice::CountLaunches(kToHost);
    own = testdevice::CountLaunches(kToHost, kernels);
    TESSERA_RETURN_IF_ERROR(run.TrainStep());
  }
  all = testdevice::CountLaunches(kToHost) - all;
  own = testdevice::CountLaunches(kToHost, kernels) - own;
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return absl::StrCat(own, " ", all - own);
}

// Kernels of the backward would wait for them. The net is two units, and the
// stream of kernels has the copy that tells the host the step's outcome.
TEST(DeviceLaunchesTest, GradientsLeaveOnAStreamOfTheirOwn) {
  for (const int world_size : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      Way way;
      way.stage = stage;
      RankPool* const pool = RankPool::Get(world_size);
      EXPECT_THAT(pool->Run("CopiesToTheHost", TextOf(way)),
                  ::testing::Each(IsOkAndHolds("1 0")))
          << world_size << ": " << TextOf(way);
      for (const int offload : {1, stage == 3 ? 2 : 1}) {
        way.offload = offload;
        EXPECT_THAT(pool->Run("CopiesToTheHost", TextOf(way)),
                    ::testing::Each(IsOkAndHolds("1 2")))
            << world_size << ": " << TextOf(way);
      }
    }
  }
}

// args: a Way. Returns how many copies to the device a step of one unit has,
// which is a little larger than the least that is sent, and its values then.
TESSERA_RANK_FUNCTION(CopiesToTheDevice) {
  constexpr int64_t kSide = 3072;
  static_assert(kSide * kSide > kLeastUploadNumel &&
                kSide * kSide < 2 * kLeastUploadNumel);
  const Way way = WayOf(args);
  EngineOptions options;
  options.device =
      way.device.empty() ? at::Device(at::kCPU) : testdevice::TestDevice(1);
  TESSERA_ASSIGN_OR_RETURN(options.communicator, GroupOf(way, world));
  RegisterTestDeviceKernels();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  torch::manual_seed(1);
  torch::nn::Linear net(
      torch::nn::LinearOptions(kSide, kSide).bias(/*bias=*/false));
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(net.ptr(), ConfigOf(way), options));
  const at::Tensor x = torch::ones(
      {1, kSide},
      at::TensorOptions(net->weight.scalar_type()).device(*options.device));
  int64_t before = 0;
  for (int step = 0; step < 2; ++step) {
    before = testdevice::CountLaunches(kToDevice);
    TESSERA_RETURN_IF_ERROR(
        engine->Backward(net->forward(x).to(at::kFloat).square().mean()));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  net->forward(x);  // in which the step is over
  const int64_t copies = testdevice::CountLaunches(kToDevice) - before;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(copies, " ", PrintOf(net->weight.detach().cpu()));
}

// The first piece leaves before all of the unit has been stepped.
TEST(DeviceLaunchesTest, NewValuesComeFromTheHostInLargePieces) {
  for (const int fp16 : {kFp32, kBf16}) {
    Way way;
    way.stage = 1;
    way.fp16 = fp16;
    way.device = "";
    const auto plain =
        RankPool::Get(1)->Run("CopiesToTheDevice", TextOf(way))[0];
    TESSERA_ASSERT_OK(plain.status());
    way.device = "1";
    way.offload = 1;
    EXPECT_THAT(
        RankPool::Get(1)->Run("CopiesToTheDevice", TextOf(way)),
        ::testing::Each(IsOkAndHolds(absl::StrCat("2", plain->substr(1)))))
        << TextOf(way);
  }
}

// args: a Way. Returns how often Create reads something of the device.
TESSERA_RANK_FUNCTION(ReadsOfCreate) {
  const int64_t before = testdevice::CountLaunches(kToHost);
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  const int64_t reads = testdevice::CountLaunches(kToHost) - before;
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return absl::StrCat(reads);
}

// Several compare their values.
TEST(DeviceLaunchesTest, OneRankReadsNoValuesInCreate) {
  for (const int stage : {0, 3}) {
    Way way;
    way.stage = stage;
    EXPECT_THAT(RankPool::Get(1)->Run("ReadsOfCreate", TextOf(way)),
                ::testing::Each(IsOkAndHolds("0")));
    EXPECT_THAT(RankPool::Get(2)->Run("ReadsOfCreate", TextOf(way)),
                ::testing::Each(IsOkAndHolds("4")));
  }
}

}  // namespace
}  // namespace tessera
