// A program that uses streams of its own, on a device without hardware
// (testing/device/test_device.h).
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/device_group.h"
#include "tests/support/device_kernels.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::Each;

constexpr int kDevice = 1;

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}
c10::Stream Default() { return Impl().getDefaultStream(TestDevice(kDevice)); }
c10::Stream FromPool() {
  return Impl().getStreamFromGlobalPool(TestDevice(kDevice));
}

void Order(c10::Stream first, c10::Stream second) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(first);
  event.block(second);
}

// Returns what was found out of order.
absl::Status CheckNoFaults() {
  testdevice::CheckFreed();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  std::vector<std::string> texts;
  for (const auto& fault : testdevice::Faults()) texts.push_back(fault.message);
  if (texts.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrJoin(texts, "\n"));
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    a = register_module("a", torch::nn::Linear(6, 9));
    b = register_module("b", torch::nn::Linear(9, 5));
    c = register_module("c", torch::nn::Linear(5, 3));
    d = register_module("d", torch::nn::Linear(5, 5));  // on `side` alone
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
  }
  // `side` is the stream of one of the two branches.
  at::Tensor forward(const at::Tensor& x, c10::Stream side) {
    const at::Tensor h = b(torch::tanh(a(x)));
    Order(Default(), side);
    at::Tensor g;
    {
      const c10::StreamGuard guard(side);
      const at::Tensor scaled = x * 2;
      g = d(b(torch::tanh(a(scaled))));
      g.record_stream(Default());
    }
    Order(side, Default());
    return dropout(c(h) + c(g)).square().mean();
  }
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr}, d{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Net);

absl::StatusOr<std::unique_ptr<Engine>> MakeEngineOf(
    const Net& net, int stage, const std::shared_ptr<Communicator>& comm) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(0.5);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(std::min(stage, 3));
  if (stage > 3) config.mutable_sharding()->set_reshard_group_size(2);
  config.mutable_zero_optimization()->set_stage3_max_reuse_distance(0);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  EngineOptions options;
  options.device = TestDevice(kDevice);
  TESSERA_ASSIGN_OR_RETURN(options.communicator,
                           DeviceGroup(comm, *options.device));
  return Engine::Create(net.ptr(), config, options);
}

void Prepare(const std::string& mode) {
  testdevice::Register({});
  RegisterTestDeviceKernels();
  testdevice::SetMode(mode == "workers" ? testdevice::Mode::kWorkers
                                        : testdevice::Mode::kAtOnce);
  testdevice::ClearFaults();
  torch::manual_seed(1);
  testdevice::ManualSeed(1);
}

// Returns the parameters, and closes the engine.
absl::StatusOr<std::string> Finish(torch::nn::Module& net, Engine* engine) {
  TESSERA_ASSIGN_OR_RETURN(const Record record, ParametersOf(*engine, net));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  TESSERA_RETURN_IF_ERROR(CheckNoFaults());
  return ToText(record);
}

// `args` is "stage mode where". Returns the parameters after two steps whose
// branches run on two streams ("side") or on one.
TESSERA_RANK_FUNCTION(Branches) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  Prepare(words[1]);
  Net net;
  TESSERA_ASSIGN_OR_RETURN(
      const auto engine,
      MakeEngineOf(net, std::stoi(words[0]), world.communicator()));
  const c10::Stream side = words[2] == "side" ? FromPool() : Default();
  torch::manual_seed(world.rank());
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x = torch::randn({4, 6}).to(TestDevice(kDevice));
    TESSERA_RETURN_IF_ERROR(engine->Backward(net->forward(x, side)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return Finish(*net, engine.get());
}

// Stage 3 that gathers for the backward in a group of two.
constexpr int kInGroup = 4;

class StreamsTest
    : public ::testing::TestWithParam<std::tuple<int, int, std::string>> {
 protected:
  // A rank function gives the same whichever of the two streams is meant.
  static void ExpectSame(const std::string& function, const char* here,
                         const char* elsewhere) {
    const auto& [world_size, stage, mode] = GetParam();
    RankPool* const pool = RankPool::Get(world_size);
    const std::string args = absl::StrCat(stage, " ", mode, " ");
    const auto one = pool->Run(function, absl::StrCat(args, here));
    const auto two = pool->Run(function, absl::StrCat(args, elsewhere));
    ASSERT_THAT(one, Each(IsOk()));
    ASSERT_THAT(two, Each(IsOk()));
    EXPECT_EQ(*one[0], *two[0]);
  }
};

TEST_P(StreamsTest, BranchesOnTwoStreamsAreOrderedAndHaveTheSameBits) {
  ExpectSame("Branches", "one", "side");
}

std::string NameOf(
    const ::testing::TestParamInfo<std::tuple<int, int, std::string>>& info) {
  const auto& [world_size, stage, mode] = info.param;
  return absl::StrCat(
      "World", world_size,
      stage == kInGroup ? "Group" : absl::StrCat("Stage", stage),
      mode == "once" ? "" : "Workers");
}

INSTANTIATE_TEST_SUITE_P(
    All, StreamsTest,
    ::testing::Combine(::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3),
                       ::testing::Values("once", "workers")),
    NameOf);
INSTANTIATE_TEST_SUITE_P(
    Groups, StreamsTest,
    ::testing::Combine(::testing::Values(2), ::testing::Values(kInGroup),
                       ::testing::Values("once", "workers")),
    NameOf);

// A stream that comes after the default one, and that nothing comes after.
c10::Stream Aside() {
  const c10::Stream stream = FromPool();
  Order(Default(), stream);
  return stream;
}

// `args` is "stage mode where". Returns the parameters after three steps. An
// evaluation, a write of the program's and the update of each step are on the
// forward's stream or, with "aside", each on a stream of its own, for none of
// which the program waits.
TESSERA_RANK_FUNCTION(Updates) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  Prepare(words[1]);
  Net net;
  TESSERA_ASSIGN_OR_RETURN(
      const auto engine,
      MakeEngineOf(net, std::stoi(words[0]), world.communicator()));
  const bool aside = words[2] == "aside";
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(10 * step + world.rank());
    const at::Tensor x = torch::randn({4, 6}).to(TestDevice(kDevice));
    TESSERA_RETURN_IF_ERROR(engine->Backward(net->forward(x, Default())));
    {
      const c10::StreamGuard guard(aside ? Aside() : Default());
      const torch::NoGradGuard no_grad;
      net->a(x);
      x.record_stream(Impl().getStream(TestDevice(kDevice)));
    }
    if (step == 1) {
      const c10::StreamGuard guard(aside ? Aside() : Default());
      const torch::NoGradGuard no_grad;
      net->b->weight.mul_(0.5);
    }
    const c10::StreamGuard guard(aside ? FromPool() : Default());
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return Finish(*net, engine.get());
}

TEST_P(StreamsTest, UpdatesOnOtherStreamsAreOrderedAndHaveTheSameBits) {
  ExpectSame("Updates", "here", "aside");
}

// `args` is "stage mode folder". Returns the parameters after two steps. In
// between the first engine is saved, and a second one with other values and
// another generator is loaded; the bits are those of two steps without that.
TESSERA_RANK_FUNCTION(Resumes) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  Prepare(words[1]);
  const int stage = std::stoi(words[0]);
  const at::Tensor x = torch::randn({4, 6}).to(TestDevice(kDevice));
  const auto step = [&](Net& net, Engine* engine) -> absl::Status {
    TESSERA_RETURN_IF_ERROR(engine->Backward(net->forward(x, Default())));
    return engine->Step();
  };
  Net first, second;
  TESSERA_ASSIGN_OR_RETURN(const auto one,
                           MakeEngineOf(first, stage, world.communicator()));
  TESSERA_RETURN_IF_ERROR(step(first, one.get()));
  TESSERA_RETURN_IF_ERROR(one->SaveCheckpoint(words[2]));
  TESSERA_RETURN_IF_ERROR(step(first, one.get()));
  TESSERA_ASSIGN_OR_RETURN(const Record expected, ParametersOf(*one, *first));
  TESSERA_RETURN_IF_ERROR(one->Close());
  testdevice::ManualSeed(99);
  TESSERA_ASSIGN_OR_RETURN(const auto two,
                           MakeEngineOf(second, stage, world.communicator()));
  TESSERA_RETURN_IF_ERROR(two->LoadCheckpoint(words[2]).status());
  TESSERA_RETURN_IF_ERROR(step(second, two.get()));
  TESSERA_ASSIGN_OR_RETURN(const Record got, ParametersOf(*two, *second));
  TESSERA_RETURN_IF_ERROR(two->Close());
  TESSERA_RETURN_IF_ERROR(CheckNoFaults());
  return FirstDifference(expected, got);
}

TEST_P(StreamsTest, ACheckpointBringsBackAllOfIt) {
  const auto& [world_size, stage, mode] = GetParam();
  const TempFolder folder;
  EXPECT_THAT(RankPool::Get(world_size)
                  ->Run("Resumes", absl::StrCat(stage, " ", mode, " ",
                                                folder.path(), "/checkpoint")),
              Each(IsOkAndHolds("")));
}

}  // namespace
}  // namespace tessera
