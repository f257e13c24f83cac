// With default keys, what is whole at once follows sharding.memory_limit_bytes;
// loads and saves are not refused what they need in passing.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/device_ledger.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/memory/memory_limit_test_util.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// A model of units that do not persist by default: what is whole at once
// decides.
constexpr int kDeep = 12;
constexpr int64_t kWidth = 512;

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    torch::manual_seed(1);
    for (int i = 0; i < kDeep; ++i) {
      layers.push_back(register_module(
          absl::StrCat("l", i),
          torch::nn::Linear(
              torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
  }
  at::Tensor Loss(int rank) {
    at::Tensor x = torch::ones({4, kWidth}, layers[0]->weight.options()) * rank;
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.square().mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

// Bytes at stage 3 with all units of Deep whole in flight that must be, and
// nothing to spare.
constexpr int64_t kUnitBytes = 4 * kWidth * kWidth;
constexpr int64_t kLeast = 4 * kDeep * kUnitBytes / kWorld + 5 * kUnitBytes;

proto::Config DefaultsOf(absl::string_view stage, int64_t limit) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(4);
  config.mutable_optimizer()->set_type("AdamW");
  if (stage == "auto") {
    config.mutable_zero_optimization()->set_auto_stage(true);
  } else {
    config.mutable_zero_optimization()->set_stage(
        std::stoi(std::string(stage)));
  }
  config.mutable_sharding()->set_shared_working_copy("off");
  config.mutable_sharding()->set_memory_limit_bytes(limit);
  return config;
}

// `args` is "device stage". With default keys, and a limit below what all whole
// units would take, training has the bits that it has without one.
TESSERA_RANK_FUNCTION(DefaultsWithin) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const at::Device device = DeviceOf(words[0]);
  MemoryLedger& ledger = LedgerOf(device);
  const int64_t before = ledger.total().current_bytes;
  EngineOptions options;
  options.communicator = world.communicator();
  if (!device.is_cpu()) options.device = device;
  int64_t peaks[2];
  std::vector<at::Tensor> trained[2];
  for (int limited = 0; limited < 2; ++limited) {
    Deep net;
    TESSERA_ASSIGN_OR_RETURN(
        auto engine,
        Engine::Create(net.ptr(),
                       DefaultsOf(limited == 1 ? words[1] : "3",
                                  limited == 1 ? before + kLeast : 0),
                       options));
    if (engine->stage() != 3) return engine->auto_reason();
    ledger.ResetPeak();
    for (int step = 0; step < 3; ++step) {
      TESSERA_RETURN_IF_ERROR(engine->Backward(net->Loss(world.rank())));
      TESSERA_RETURN_IF_ERROR(engine->Step());
    }
    peaks[limited] = ledger.total().peak_bytes - before;
    TESSERA_RETURN_IF_ERROR(engine->Close());
    for (const at::Tensor& p : net->parameters()) {
      trained[limited].push_back(p.detach().cpu().clone());
    }
  }
  if (peaks[0] <= kLeast) return absl::StrCat("fits anyway: ", peaks[0]);
  for (size_t i = 0; i < trained[0].size(); ++i) {
    if (!trained[0][i].equal(trained[1][i])) return absl::StrCat("other ", i);
  }
  return absl::StrCat(before == 0 ? "" : "others hold memory; ", "same bits");
}

// args: "device". Requests in passing are not refused.
TESSERA_RANK_FUNCTION(PassingCopies) {
  const at::Device device = DeviceOf(args);
  MemoryLedger& ledger = LedgerOf(device);
  EngineOptions options;
  options.communicator = world.communicator();
  if (!device.is_cpu()) options.device = device;
  Deep net;
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      Engine::Create(net.ptr(), DefaultsOf("3", 2 * kLeast), options));
  const int64_t rest = 2 * kLeast - ledger.total().current_bytes;
  if (!ledger.TryAdd(MemoryKind::kOther, rest)) return "not that much";
  const std::string dir = absl::StrCat(::testing::TempDir(), "/passing_",
                                       device.is_cpu() ? "cpu" : "device");
  // A tensor of another layout needs rows of its own, too.
  const absl::Status saved = engine->SaveSafetensors(dir);
  const absl::Status loaded = engine->LoadSafetensors(dir).status();
  const absl::Status dict = engine->FullStateDict().status();
  ledger.Remove(MemoryKind::kOther, rest);
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(dir + "_checkpoint"));
  if (!ledger.TryAdd(MemoryKind::kOther, rest)) return "not as much again";
  const absl::Status resumed =
      engine->LoadCheckpoint(dir + "_checkpoint").status();
  const bool binds = ledger.limit_bytes() == 2 * kLeast;
  ledger.Remove(MemoryKind::kOther, rest);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(saved.ToString(), " ", loaded.ToString(), " ",
                      dict.ToString(), " ", resumed.ToString(),
                      binds ? " and it binds again" : "");
}

TEST(MemoryLimitWithDefaults, KeepsAsManyUnitsWholeAsFit) {
  for (const char* args : {"cpu 3", "cpu auto", "device 3", "device auto"}) {
    for (auto& answer : RankPool::Get(kWorld)->Run("DefaultsWithin", args)) {
      EXPECT_THAT(answer, IsOkAndHolds("same bits")) << args;
    }
  }
}

TEST(MemoryLimitOfLoads, PassingCopiesAreNotRefused) {
  for (const char* device : {"cpu", "device"}) {
    for (auto& answer : RankPool::Get(kWorld)->Run("PassingCopies", device)) {
      EXPECT_THAT(answer, IsOkAndHolds("OK OK OK OK and it binds again"))
          << device;
    }
  }
}

}  // namespace
}  // namespace tessera
