// Compares the most that a device's allocator has given out at any moment of a
// step at stage 3, including activations and what collectives need, with the
// formula (docs/design.md, "Devices"). R is what is there between steps, G this
// rank's share of the gradients, B the largest unit, b its largest parameter.
//
//   forward    R + 2 B
//   backward   R + G + 2 B + 2 B + b     whole units; flat gradients; the
//                                        gradient that is copied there
//
// On a device without hardware (testing/device/test_device.h).
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/at_start.h"
#include "tests/support/device_group.h"
#include "tests/support/device_kernels.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

constexpr int kBlocks = 5;
constexpr int64_t kDim = 384;
// Room for parts of slices, activations and rounding.
constexpr int64_t kSlack = 256 << 10;
constexpr int64_t kSlicesBytes = 64 << 10;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
  }
  at::Tensor forward(const at::Tensor& h) {
    return h + down(torch::relu(up(h)));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

class Allocated {
 public:
  static int64_t Now() { return Stats().current; }
  static int64_t Peak() { return Stats().peak; }
  static int64_t Reserved() {
    return Allocator()->getDeviceStats(1).reserved_bytes[0].current;
  }
  static void ResetPeak() { Allocator()->resetPeakStats(1); }

 private:
  static c10::DeviceAllocator* Allocator() {
    return c10::getDeviceAllocator(c10::DeviceType::PrivateUse1);
  }
  static c10::CachingAllocator::Stat Stats() {
    return Allocator()->getDeviceStats(1).allocated_bytes[0];
  }
};

// Returns for three steps what is there before, the most in the forward, and
// the most in the backward. (The update's memory is there already.)
TESSERA_RANK_FUNCTION(PeaksOnDevice) {
  testdevice::Register({});
  RegisterTestDeviceKernels();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  const at::Device device = testdevice::TestDevice(1);
  const int64_t before = Allocated::Now();
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<Communicator> host,
      world.communicator()->Split(0, CommTag("host of devices")));
  DeviceTransportOptions collectives = DeviceOptionsOf(*host, device);
  collectives.slices_bytes = kSlicesBytes;
  EngineOptions options;
  options.device = device;
  options.communicator = host;
  if (host->world_size() > 1) {
    TESSERA_ASSIGN_OR_RETURN(options.communicator,
                             MakeDeviceGroup(collectives, std::move(host)));
  }
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kBlocks; ++i) model->push_back(Block());
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_optimizer()->set_type("AdamW");
  auto* const zero = config.mutable_zero_optimization();
  zero->set_stage(3);
  zero->set_stage3_max_reuse_distance(0);
  zero->set_stage3_param_persistence_threshold(0);
  zero->set_reduce_bucket_size(1);
  zero->set_stage3_prefetch_bucket_size(1);  // the next unit
  config.mutable_sharding()->set_shard_alone(true);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model.ptr(), config, options));
  // What the parameters were in is given back, and not kept for what training
  // never asks for.
  if (Allocated::Reserved() != Allocated::Now()) {
    return absl::InternalError(
        absl::StrCat("Create leaves ", Allocated::Reserved() - Allocated::Now(),
                     " bytes in the allocator's cache"));
  }
  const at::Tensor x = torch::randn({2, kDim}).to(device);
  std::string peaks;
  for (int step = 0; step < 3; ++step) {
    absl::StrAppend(&peaks, Allocated::Now() - before, " ");
    Allocated::ResetPeak();
    at::Tensor loss = model->forward(x).square().mean();
    absl::StrAppend(&peaks, Allocated::Peak() - before, " ");
    Allocated::ResetPeak();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    absl::StrAppend(&peaks, Allocated::Peak() - before, " ");
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return peaks;
}

class DeviceMemoryTest : public ::testing::TestWithParam<int> {};

TEST_P(DeviceMemoryTest, StageThreeIsWithinTheFormula) {
  const int world_size = GetParam();
  const int64_t weight = 4 * kDim * kDim * 4;
  const int64_t unit = 2 * weight + 5 * kDim * 4;
  const int64_t whole = kBlocks * unit;
  for (const auto& answer :
       RankPool::Get(world_size)->Run("PeaksOnDevice", "")) {
    TESSERA_ASSERT_OK(answer.status());
    std::istringstream in(*answer);
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step, " of ", *answer));
      int64_t between = 0, forward = 0, rest = 0;
      ASSERT_TRUE(in >> between >> forward >> rest);
      EXPECT_LE(between, 3 * whole / world_size + kSlack);
      EXPECT_LE(forward, between + 2 * unit + kSlack);
      // The flat gradients of one rank are its share.
      const int64_t units = world_size > 1 ? 4 : 2;
      const int64_t bound =
          between + whole / world_size + units * unit + weight;
      EXPECT_LE(rest, bound + kSlack);
      // The formula says what is held, not only what is enough: all but the
      // last unit's share of the gradients is there when its own are.
      EXPECT_GE(rest, bound - unit - weight);
    }
  }
}

// One rank: with sharding.shard_alone.
INSTANTIATE_TEST_SUITE_P(All, DeviceMemoryTest, ::testing::Values(1, 2),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

}  // namespace
}  // namespace tessera
