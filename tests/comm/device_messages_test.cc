// Messages between ranks (ShardServer::Post and Take) on the device without
// hardware: the sender's stream writes them late, and the receiver's uses them.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/shard_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/comm/collective_checks.h"
#include "tests/support/device_group.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::Each;

constexpr int64_t kNumel = 3001;

at::Tensor Values(int from, int to, int64_t key) {
  return torch::arange(kNumel).add(1000 * from + 100 * to + key).to(at::kFloat);
}

// "once" and "workers", a device's modes. Each rank sends to the next one, and
// the host waits for the bytes alone.
TESSERA_RANK_FUNCTION(SendsAround) {
  PrepareDevice(args);
  const at::Device device = TestDevice(kDevice);
  const int w = world.world_size(), r = world.rank();
  const int to = (r + 1) % w, from = (r + w - 1) % w;
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<ShardServer> server,
                           world.communicator()->ServeShards({"messages"}));
  for (int64_t key = 0; key < 20; ++key) {
    at::Tensor got = torch::zeros({kNumel}, device);
    const CommFuture taken = server->Take(from, key, got, {"message"});
    at::Tensor sent = Values(r, to, key).to(device);
    sent.mul_(3);
    server->Post(to, key, std::exchange(sent, at::Tensor()));
    TESSERA_RETURN_IF_ERROR(taken.Wait());
    got.add_(1);
    TESSERA_RETURN_IF_ERROR(ExpectBits(
        got.cpu(), Values(from, r, key).mul(3).add(1), absl::StrCat(key)));
  }
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("all have taken"));
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  return faults.empty() ? "ok" : faults[0].message;
}

class DeviceMessagesTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DeviceMessagesTest, AreInTheOrderOfTheStreams) {
  EXPECT_THAT(RankPool::Get(3)->Run("SendsAround", GetParam()),
              Each(IsOkAndHolds("ok")));
}

INSTANTIATE_TEST_SUITE_P(All, DeviceMessagesTest,
                         ::testing::Values("once", "workers"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tessera
