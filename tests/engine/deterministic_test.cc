// libtorch's deterministic algorithms are on while an engine on a device is
// open (sharding.deterministic), and what they were before afterwards. On a
// device without hardware (testing/device/test_device.h).
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/at_start.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

using testdevice::TestDevice;

std::string Now() {
  const at::Context& c = at::globalContext();
  if (!c.deterministicAlgorithms()) return c.deterministicCuDNN() ? "?" : "off";
  return c.deterministicAlgorithmsWarnOnly() ? "warns" : "errors";
}

// Makes the same layer on all ranks.
torch::nn::Linear Layer(int64_t width) {
  torch::manual_seed(1);
  return torch::nn::Linear(width, width);
}

absl::StatusOr<std::unique_ptr<Engine>> Make(torch::nn::Linear net,
                                             const std::string& wanted,
                                             bool on_device,
                                             int64_t memory_limit = 0) {
  testdevice::Register({});
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(2);
  if (!wanted.empty()) config.mutable_sharding()->set_deterministic(wanted);
  config.mutable_sharding()->set_memory_limit_bytes(memory_limit);
  EngineOptions options;
  if (on_device) options.device = TestDevice(1);
  return Engine::Create(net.ptr(), config, options);
}

// args: "", "auto", "on", "off" or "cpu". Returns the switches before, within
// and afterwards.
TESSERA_RANK_FUNCTION(Around) {
  std::vector<std::string> seen = {Now()};
  const bool on_device = args != "cpu";
  torch::nn::Linear net = Layer(8);
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Make(net, on_device ? std::string(args) : "on", on_device));
  seen.push_back(Now());
  const at::Tensor x = torch::ones({2, 8}, net->weight.options());
  TESSERA_RETURN_IF_ERROR(engine->Backward(net->forward(x).square().mean()));
  TESSERA_RETURN_IF_ERROR(engine->Step());
  seen.push_back(Now());
  TESSERA_RETURN_IF_ERROR(engine->Close());
  seen.push_back(Now());
  return absl::StrJoin(seen, " ");
}

TESSERA_RANK_FUNCTION(AfterAFailure) {
  torch::nn::Linear net = Layer(64);
  const auto engine = Make(net, "auto", /*on_device=*/true, /*limit=*/100);
  return absl::StrCat(absl::IsResourceExhausted(engine.status()), " ", Now());
}

// Closes the first one of two engines, then destroys the other.
TESSERA_RANK_FUNCTION(TwoEngines) {
  torch::nn::Linear a = Layer(8), b = Layer(8);
  TESSERA_ASSIGN_OR_RETURN(auto first, Make(a, "on", true));
  TESSERA_ASSIGN_OR_RETURN(auto second, Make(b, "auto", true));
  std::vector<std::string> seen = {Now()};
  TESSERA_RETURN_IF_ERROR(first->Close());
  seen.push_back(Now());
  second.reset();
  seen.push_back(Now());
  return absl::StrJoin(seen, " ");
}

TESSERA_RANK_FUNCTION(UsersOwn) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  torch::nn::Linear net = Layer(8);
  auto engine = Make(net, "auto", true);
  std::vector<std::string> seen = {Now()};
  if (engine.ok()) seen.push_back((*engine)->Close().ToString());
  seen.push_back(Now());
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  return absl::StrJoin(seen, " ");
}

void Expect(const std::string& function, const std::string& args,
            const std::string& wanted) {
  for (auto& answer : RankPool::Get(2)->Run(function, args)) {
    EXPECT_THAT(answer, IsOkAndHolds(wanted)) << args;
  }
}

TEST(Deterministic, FromCreateToClose) {
  Expect("Around", "", "off warns warns off");
  Expect("Around", "auto", "off warns warns off");
  Expect("Around", "on", "off errors errors off");
  Expect("Around", "off", "off off off off");
  Expect("Around", "cpu", "off off off off");
}

TEST(Deterministic, AFailedCreateGivesItBack) {
  Expect("AfterAFailure", "", "1 off");
}

TEST(Deterministic, TheLastEngineGivesItBack) {
  Expect("TwoEngines", "", "errors warns off");
}

TEST(Deterministic, WhatTheUserHadSetIsKept) {
  Expect("UsersOwn", "", "errors OK errors");
}

}  // namespace
}  // namespace tessera
