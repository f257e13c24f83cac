// sharding.memory_limit_bytes binds where the engine trains: on the CPU, and on
// device 1 of 2 of a device without hardware (testing/device/test_device.h).
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/layout/flat_buffer.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/device_ledger.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/memory/memory_limit_test_util.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(1);  // the same on all ranks
    for (int i = 0; i < 4; ++i) {
      layers.push_back(
          register_module(absl::StrCat("l", i), torch::nn::Linear(256, 256)));
    }
  }
  at::Tensor Loss(int rank) {
    at::Tensor x = torch::ones({8, 256}, layers[0]->weight.options()) * rank;
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.square().mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Net);

absl::StatusOr<std::unique_ptr<Engine>> Make(
    const Net& net, at::Device device, int stage, int64_t limit,
    std::shared_ptr<Communicator> comm) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(8);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(stage);
  config.mutable_zero_optimization()->set_stage3_max_reuse_distance(0);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  config.mutable_sharding()->set_memory_limit_bytes(limit);
  EngineOptions options;
  options.communicator = std::move(comm);
  if (!device.is_cpu()) options.device = device;
  return Engine::Create(net.ptr(), config, options);
}

absl::Status Train(Engine* engine, Net& net, int rank) {
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(net->Loss(rank)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return absl::OkStatus();
}

// Returns the bytes that three steps need at most besides what is held before.
absl::StatusOr<int64_t> Need(at::Device device, int stage, const World& world) {
  MemoryLedger& ledger = LedgerOf(device);
  const int64_t before = ledger.total().current_bytes;
  Net net;
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Make(net, device, stage, 0, world.communicator()));
  ledger.ResetPeak();
  TESSERA_RETURN_IF_ERROR(Train(engine.get(), net, world.rank()));
  const int64_t need = ledger.total().peak_bytes - before;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return need;
}

absl::Status CheckNoLimit(at::Device device) {
  if (LedgerOf(device).limit_bytes() == MemoryLedger::kNoLimit) {
    return absl::OkStatus();
  }
  return absl::InternalError("the limit stays");
}

// args: "device stage". With exactly what is needed it trains; nothing else is
// limited.
TESSERA_RANK_FUNCTION(EnoughIsEnough) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const at::Device device = DeviceOf(words[0]);
  const int stage = std::stoi(words[1]);
  TESSERA_ASSIGN_OR_RETURN(const int64_t need, Need(device, stage, world));
  // Memory that others hold does not count.
  auto on_host =
      AllocateCounted(device.is_cpu() ? 0 : 64 * kMiB, MemoryKind::kOther);
  TESSERA_RETURN_IF_ERROR(on_host.status());
  const int64_t limit = LedgerOf(device).total().current_bytes + need;
  Net net;
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Make(net, device, stage, limit, world.communicator()));
  TESSERA_RETURN_IF_ERROR(Train(engine.get(), net, world.rank()));
  const auto allocate = [&](at::Device where) {
    return FlatBuffer::Allocate(limit + 1, at::kByte, where, MemoryKind::kOther)
        .status();
  };
  const absl::Status here = allocate(device);
  if (!absl::IsResourceExhausted(here)) return here.ToString() + " here";
  TESSERA_RETURN_IF_ERROR(allocate(TestDevice(0)));
  if (!device.is_cpu()) TESSERA_RETURN_IF_ERROR(allocate(at::kCPU));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  TESSERA_RETURN_IF_ERROR(CheckNoLimit(device));
  TESSERA_RETURN_IF_ERROR(allocate(device));
  return "fine";
}

// args: "device stage part who". Returns what Create, or else training, returns
// on a rank that may use `part` per cent of what is needed; who: "all" or
// "last".
TESSERA_RANK_FUNCTION(TooLittle) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const at::Device device = DeviceOf(words[0]);
  const int stage = std::stoi(words[1]);
  TESSERA_ASSIGN_OR_RETURN(const int64_t need, Need(device, stage, world));
  MemoryLedger& ledger = LedgerOf(device);
  const int64_t limit =
      ledger.total().current_bytes + need * std::stoi(words[2]) / 100;
  const bool all = words[3] == "all";
  Net net;
  if (!all && world.rank() == kWorld - 1) ledger.SetLimit(limit);
  auto engine = Make(net, device, stage, all ? limit : 0, world.communicator());
  absl::Status status = engine.status();
  if (status.ok()) status = Train(engine->get(), net, world.rank());
  ledger.SetLimit(MemoryLedger::kNoLimit);
  if (engine.ok()) {
    TESSERA_RETURN_IF_ERROR((*engine)->Close());
  }
  TESSERA_RETURN_IF_ERROR(CheckNoLimit(device));
  // The module is whole, whether Create or a step has failed.
  for (const at::Tensor& p : net->parameters()) {
    if (!p.cpu().isfinite().all().item<bool>()) return "not whole";
  }
  return absl::StrCat(engine.ok() ? "step: " : "create: ", status.ToString());
}

// Returns what a step's report says of the device that trains.
TESSERA_RANK_FUNCTION(ReportOfAStep) {
  const at::Device device = DeviceOf("device");
  Net net;
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Make(net, device, 2, 0, world.communicator()));
  auto on_host = AllocateCounted(256 * kMiB, MemoryKind::kOther);
  TESSERA_RETURN_IF_ERROR(on_host.status());
  TESSERA_RETURN_IF_ERROR(Train(engine.get(), net, world.rank()));
  const StepMemoryReport report = engine->last_step().memory;
  const StateBytes states = engine->state_bytes();
  const HeldMemory& held = report.at_peak.held;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  if (report.device != device.str()) return report.device;
  const auto is = [](absl::string_view what, int64_t got, int64_t wanted) {
    return got == wanted ? std::string()
                         : absl::StrCat(what, " ", got, " not ", wanted, "; ");
  };
  return absl::StrCat(
      is("parameters", held[HeldKind::kParameters], states.parameters),
      is("optimizer", held[HeldKind::kOptimizer], states.optimizer),
      is("other", held[HeldKind::kOther], 0),
      is("tensors", held[HeldKind::kTensors] > 0, 1),
      is("below the peak", held.total() <= report.peak_bytes, 1),
      is("near the peak", held.total() > report.peak_bytes / 2, 1),
      is("in no host", report.peak_bytes < 256 * kMiB, 1),
      is("on the host", report.host_peak_bytes >= 256 * kMiB, 1),
      is("reserved", report.reserved_peak_bytes >= report.peak_bytes, 1),
      is("units", static_cast<int64_t>(report.activations.size()), 0));
}

// A second engine, with a limit of `args` bytes, writes its warning to stderr.
TESSERA_RANK_FUNCTION(SecondLimit) {
  std::string said;
  Net a, b;
  TESSERA_ASSIGN_OR_RETURN(auto first,
                           Make(a, at::kCPU, 0, 1 << 28, world.communicator()));
  ::testing::internal::CaptureStderr();
  auto second =
      Make(b, at::kCPU, 0, std::stoll(std::string(args)), world.communicator());
  said = ::testing::internal::GetCapturedStderr();
  TESSERA_RETURN_IF_ERROR(second.status());
  TESSERA_RETURN_IF_ERROR((*second)->Close());
  TESSERA_RETURN_IF_ERROR(first->Close());
  return said;
}

class MemoryLimitTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static std::string Args() {
    return absl::StrCat(std::get<0>(GetParam()), " ", std::get<1>(GetParam()));
  }
  static std::string LimitOf() {
    return std::get<0>(GetParam()) == "cpu" ? "the limit is "
                                            : "the limit of testdevice:1 is ";
  }
};

INSTANTIATE_TEST_SUITE_P(All, MemoryLimitTest,
                         ::testing::Combine(::testing::Values("cpu", "device"),
                                            ::testing::Values(0, 2, 3)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

TEST_P(MemoryLimitTest, WhatIsNeededIsEnoughAndOthersAreNotBound) {
  for (auto& answer : RankPool::Get(kWorld)->Run("EnoughIsEnough", Args())) {
    EXPECT_THAT(answer, IsOkAndHolds("fine"));
  }
}

TEST_P(MemoryLimitTest, CreateIsRefusedOnAllRanks) {
  auto answers = RankPool::Get(kWorld)->Run("TooLittle", Args() + " 30 all");
  for (auto& answer : answers) {
    EXPECT_THAT(answer,
                IsOkAndHolds(AllOf(
                    HasSubstr("create: RESOURCE_EXHAUSTED"),
                    HasSubstr("cannot allocate "), HasSubstr(LimitOf()),
                    HasSubstr("(sharding.memory_limit_bytes: raise it, or "),
                    HasSubstr("; held now: "), HasSubstr("held by rank "))));
  }
}

TEST_P(MemoryLimitTest, CreateThatIsRefusedOnOneRankFailsOnAll) {
  const auto answers =
      RankPool::Get(kWorld)->Run("TooLittle", Args() + " 30 last");
  EXPECT_THAT(answers[1], IsOkAndHolds(AllOf(HasSubstr("create: RESOURCE_"),
                                             HasSubstr(LimitOf()))));
  EXPECT_THAT(answers[0],
              IsOkAndHolds(AllOf(HasSubstr("create: RESOURCE_EXHAUSTED"),
                                 HasSubstr("rank 1: cannot allocate"),
                                 HasSubstr(LimitOf()))));
}

// Gradients are made in a backward; stage 3's gathers, too, are refused there
// or before.
TEST(MemoryLimitInTraining, IsRefusedOnAllRanks) {
  for (const char* device : {"cpu", "device"}) {
    const auto answers = RankPool::Get(kWorld)->Run(
        "TooLittle", absl::StrCat(device, " 2 99 all"));
    for (const auto& answer : answers) {
      EXPECT_THAT(answer,
                  IsOkAndHolds(AllOf(HasSubstr("step: RESOURCE_EXHAUSTED"),
                                     HasSubstr("sharding.memory_limit_bytes"),
                                     HasSubstr("held by rank "))));
    }
  }
}

TEST(MemoryLimitOfTwoEngines, TheSecondIsToldWhichBinds) {
  const auto said = [](const std::string& limit) {
    return *RankPool::Get(kWorld)->Run("SecondLimit", limit)[0];
  };
  EXPECT_THAT(said("0"), HasSubstr("limits cpu to 268435456 bytes, and this "
                                   "one has no limit: while both are open the "
                                   "other's binds"));
  EXPECT_THAT(said("134217728"), HasSubstr("to 134217728 bytes: while both are "
                                           "open this one's binds"));
}

TEST(DeviceReport, IsOfTheDeviceThatTrains) {
  for (auto& answer : RankPool::Get(kWorld)->Run("ReportOfAStep", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

}  // namespace
}  // namespace tessera
