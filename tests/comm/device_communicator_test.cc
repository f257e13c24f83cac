// What the transport over c10d's NCCL does, on the device without hardware,
// with a backend of NCCL's manners (tests/support/device_group.h).
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"
#include "comm/cuda_ipc/slot_backend.h"
#include "comm/device/device_transport.h"
#include "comm/group/group_communicator.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/endless_backend.h"
#include "tests/support/device_group.h"
#include "tests/support/rank_pool.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Of rank `rank`, from element `begin` on.
at::Tensor Values(int rank, int64_t numel, int64_t begin = 0) {
  return SumInOrder({rank}, begin, numel, at::kFloat);
}

// "once" and "workers", a device's modes.
TESSERA_RANK_FUNCTION(Collectives) {
  PrepareDevice(args);
  const at::Device device = TestDevice(kDevice);
  {
    DeviceTransportOptions options;
    options.slices_bytes = 900;  // parts of unequal size
    TESSERA_ASSIGN_OR_RETURN(const auto comm, ConnectDevices(world, options));
    for (int i = 0; i < 3; ++i) {
      TESSERA_RETURN_IF_ERROR(CheckTensorCollectives(world, *comm, device));
      TESSERA_RETURN_IF_ERROR(CheckTensorCollectives(world, *comm, at::kCPU));
    }
    TESSERA_RETURN_IF_ERROR(CheckHalves(world, *comm, device));
  }
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  return faults.empty() ? "ok" : faults[0].message;
}

class CollectivesTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CollectivesTest, AreRightAndInOrder) {
  EXPECT_THAT(RankPool::Get(3)->Run("Collectives", GetParam()),
              Each(IsOkAndHolds("ok")));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesTest,
                         ::testing::Values("once", "workers"),
                         [](const auto& info) { return info.param; });

// The device is kept busy until the program has posted, waited and freed.
TESSERA_RANK_FUNCTION(NobodyWaits) {
  PrepareDevice("workers");
  const at::Device device = TestDevice(kDevice);
  TESSERA_ASSIGN_OR_RETURN(const auto comm, ConnectDevices(world, {}));
  constexpr int64_t kNumel = 1001;
  at::Tensor sum = Values(world.rank(), kNumel).to(device);
  at::Tensor whole = torch::zeros({world.world_size() * kNumel}, device);
  testdevice::ResetHostWaits();
  auto posted = std::make_shared<std::atomic<bool>>(false);
  testdevice::Launch(
      c10::impl::VirtualGuardImpl(device.type()).getStream(device), "long work",
      {}, [posted] {
        while (!*posted) sched_yield();
      });
  TESSERA_RETURN_IF_ERROR(comm->AllReduceSum(sum, {"sum"}).Wait());
  TESSERA_RETURN_IF_ERROR(
      comm->AllGather(std::exchange(sum, at::Tensor()), whole, {"gather"})
          .Wait());
  whole.mul_(2);
  const int64_t waits = testdevice::CountHostWaits();
  *posted = true;
  std::vector<int> ranks;
  for (int r = 0; r < world.world_size(); ++r) ranks.push_back(r);
  const at::Tensor expected = SumInOrder(ranks, 0, kNumel, at::kFloat);
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      whole.cpu(), expected.repeat({world.world_size()}).mul(2), "gather"));
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  return faults.empty() ? absl::StrCat("waits: ", waits) : faults[0].message;
}

TEST(DeviceCommunicatorTest, NoThreadWaitsForTheDevice) {
  EXPECT_THAT(RankPool::Get(2)->Run("NobodyWaits", "", absl::Seconds(20)),
              Each(IsOkAndHolds("waits: 0")));
}

// A gather waits on the device for what the program has not allowed yet; a sum
// that comes after it, and does not need that, ends there meanwhile.
TESSERA_RANK_FUNCTION(SumsBesideAGather) {
  PrepareDevice("workers");
  const at::Device device = TestDevice(kDevice);
  TESSERA_ASSIGN_OR_RETURN(
      const std::shared_ptr<Communicator> host,
      world.communicator()->Split(0, CommTag("host of devices")));
  const auto meeting = std::make_shared<HostMeeting>(
      std::dynamic_pointer_cast<GroupCommunicator>(host)->transport());
  DeviceTransportOptions options = DeviceOptionsOf(*host, device);
  options.on_agreed = [meeting](const auto& call) { meeting->Begin(call); };
  c10::intrusive_ptr<c10d::Backend> lanes[2];
  for (auto& lane : lanes) {
    TESSERA_ASSIGN_OR_RETURN(
        lane, MakeDeviceBackend(host.get(), device,
                                [meeting] { return meeting->Meet(); }));
  }
  TESSERA_ASSIGN_OR_RETURN(const auto comm,
                           MakeDeviceGroup(options, host, lanes[0], lanes[1]));
  constexpr int64_t kNumel = 1001;
  const int size = world.world_size();
  const at::Tensor mine = Values(world.rank(), kNumel).to(device);
  at::Tensor whole = torch::zeros({size * kNumel}, device);
  const c10::impl::VirtualGuardImpl impl(device.type());
  auto allowed = std::make_shared<std::atomic<bool>>(false);
  testdevice::Launch(impl.getStream(device), "long work", {}, [allowed] {
    while (!*allowed) sched_yield();
  });
  const CommFuture gathered = comm->AllGather(mine, whole, {"gather"});
  at::Tensor summed;
  {
    const c10::StreamGuard aside(impl.getStreamFromGlobalPool(device));
    const at::Tensor sum = Values(world.rank(), kNumel).to(device);
    TESSERA_RETURN_IF_ERROR(comm->AllReduceSum(sum, {"sum"}).Wait());
    summed = sum.cpu();
  }
  *allowed = true;
  TESSERA_RETURN_IF_ERROR(gathered.Wait());
  std::vector<int> ranks;
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(r);
    all.push_back(Values(r, kNumel));
  }
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole.cpu(), torch::cat(all), "gather"));
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(summed, SumInOrder(ranks, 0, kNumel, at::kFloat), "sum"));
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  return faults.empty() ? "ok" : faults[0].message;
}

TEST(DeviceCommunicatorTest, SumsGoOnBesideAGatherThatWaits) {
  EXPECT_THAT(RankPool::Get(2)->Run("SumsBesideAGather", "", absl::Seconds(20)),
              Each(IsOkAndHolds("ok")));
}

// A collective that the program does not wait for, on a stream of its own,
// reads memory that has been freed, and given out again.
TESSERA_RANK_FUNCTION(Dropped) {
  PrepareDevice("once");
  const at::Device device = TestDevice(kDevice);
  const c10::StreamGuard aside(c10::impl::VirtualGuardImpl(device.type())
                                   .getStreamFromGlobalPool(device));
  TESSERA_ASSIGN_OR_RETURN(const auto comm, ConnectDevices(world, {}));
  constexpr int64_t kNumel = 1001;
  at::Tensor whole = torch::zeros({world.world_size() * kNumel}, device);
  comm->AllGather(Values(world.rank(), kNumel).to(device), whole, {"dropped"});
  TESSERA_RETURN_IF_ERROR(comm->Barrier("it has been given to the device"));
  const at::Tensor again = torch::zeros({kNumel}, device);
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  return faults.empty() ? "ok" : faults[0].message;
}

TEST(DeviceCommunicatorTest, WhatNobodyWaitsForKeepsItsMemory) {
  EXPECT_THAT(RankPool::Get(2)->Run("Dropped", ""), Each(IsOkAndHolds("ok")));
}

// What the collective of this rank ends with. `kind` "gather": of one size on
// all ranks, of another unit on each; "kind": a gather on rank 0, a sum on the
// others; "size": of other sizes.
TESSERA_RANK_FUNCTION(DifferentCollectives) {
  PrepareDevice("once");
  TESSERA_ASSIGN_OR_RETURN(const auto comm, ConnectDevices(world, {}));
  const bool first = world.rank() == 0;
  const std::string unit = first ? "unit a" : "unit b";
  const int64_t numel = first || args != "size" ? 1000 : 500;
  const auto on = torch::TensorOptions(TestDevice(kDevice));
  const at::Tensor shard = torch::full({numel}, 1.0 * world.rank(), on);
  at::Tensor whole = torch::zeros({world.world_size() * numel}, on);
  const CommFuture end = !first && args == "kind"
                             ? comm->AllReduceSum(whole, {unit})
                             : comm->AllGather(shard, whole, {unit});
  return end.Wait().ToString();
}

class DifferentTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DifferentTest, RanksInDifferentCollectivesAreToldOfBoth) {
  EXPECT_THAT(RankPool::Get(2)->Run("DifferentCollectives", GetParam(),
                                    absl::Seconds(20)),
              Each(IsOkAndHolds(AllOf(HasSubstr("different collectives"),
                                      HasSubstr("unit a"), HasSubstr("unit b"),
                                      HasSubstr("rank ")))));
}

INSTANTIATE_TEST_SUITE_P(All, DifferentTest,
                         ::testing::Values("gather", "kind", "size"),
                         [](const auto& info) { return info.param; });

// As NCCL takes any two gathers of one size for one.
TESSERA_RANK_FUNCTION(DifferentUnits) {
  PrepareDevice("once");
  TESSERA_ASSIGN_OR_RETURN(
      const auto comm,
      ConnectDevices(world, {},
                     c10::make_intrusive<EndlessBackend>(world, true)));
  const auto on = torch::TensorOptions(TestDevice(kDevice));
  return comm
      ->AllGather(torch::ones({1}, on), torch::zeros({world.world_size()}, on),
                  {world.rank() == 0 ? "unit a" : "unit b"})
      .Wait()
      .ToString();
}

TEST(DeviceCommunicatorTest, RanksAgreeBeforeABackendThatDoesNotMeet) {
  RankPool pool({});
  EXPECT_THAT(
      pool.Run("DifferentUnits", "", absl::Seconds(20)),
      Each(IsOkAndHolds(AllOf(HasSubstr("different collectives"),
                              HasSubstr("unit a"), HasSubstr("unit b")))));
}

// "": how a gather of the device that does not end ends, and the collective
// after it; "stuck": and it cannot be aborted; "gone": and rank 1's process
// ends.
TESSERA_RANK_FUNCTION(Endless) {
  PrepareDevice("once");
  TESSERA_ASSIGN_OR_RETURN(
      const auto comm,
      ConnectDevices(
          world, {},
          c10::make_intrusive<EndlessBackend>(world, args != "stuck"),
          args == "stuck" ? absl::Milliseconds(200) : absl::Seconds(15)));
  const auto on = torch::TensorOptions(TestDevice(kDevice));
  at::Tensor whole = torch::zeros({world.world_size()}, on);
  const CommFuture given =
      comm->AllGather(torch::ones({1}, on), whole, {"unit a"});
  TESSERA_RETURN_IF_ERROR(given.Wait());
  if (args == "gone" && world.rank() == 1) _exit(3);
  const auto* queued = dynamic_cast<GroupCommunicator*>(comm.get());
  while (queued->failure().ok()) absl::SleepFor(absl::Milliseconds(5));
  while (args == "stuck") pause();
  return comm->Barrier("afterwards").ToString();
}

// Rank 1's process ends after the ranks have agreed on a gather, when they are
// to meet while they give it to their devices.
TESSERA_RANK_FUNCTION(EndsBeforeAMeeting) {
  PrepareDevice("once");
  TESSERA_ASSIGN_OR_RETURN(
      const std::shared_ptr<Communicator> host,
      world.communicator()->Split(0, CommTag("host of devices")));
  const auto meeting = std::make_shared<HostMeeting>(
      std::dynamic_pointer_cast<GroupCommunicator>(host)->transport());
  DeviceTransportOptions options = DeviceOptionsOf(*host, TestDevice(kDevice));
  options.on_agreed = [meeting](const auto& call) { meeting->Begin(call); };
  const bool ends = world.rank() == 1;
  TESSERA_ASSIGN_OR_RETURN(
      auto backend,
      MakeDeviceBackend(host.get(), options.device, [ends, meeting] {
        if (ends) _exit(3);
        return meeting->Meet();
      }));
  TESSERA_ASSIGN_OR_RETURN(const auto comm,
                           MakeDeviceGroup(options, host, std::move(backend)));
  const auto on = torch::TensorOptions(options.device);
  at::Tensor whole = torch::zeros({world.world_size()}, on);
  return comm->AllGather(torch::ones({1}, on), whole, {"unit a"})
      .Wait()
      .ToString();
}

TEST(DeviceCommunicatorTest, WhatNeverEndsOnTheDeviceIsEndedByTheTimeout) {
  RankPool pool(TwoRanks(absl::Seconds(2)));
  EXPECT_THAT(pool.Run("Endless", "", absl::Seconds(20)),
              Each(IsOkAndHolds(AllOf(
                  HasSubstr("unit a"), HasSubstr("has not ended within 2s"),
                  HasSubstr("given it to their devices")))));
}

TEST(DeviceCommunicatorTest, TheEndOfARankEndsWhatItsDeviceWasGiven) {
  RankPool pool(TwoRanks(absl::Seconds(40)));
  const auto answers = pool.Run("Endless", "gone", absl::Seconds(20));
  EXPECT_THAT(answers[0], IsOkAndHolds(HasSubstr("rank 1 has ended")));
}

TEST(DeviceCommunicatorTest, TheEndOfARankEndsTheMeetingOfTheOthers) {
  RankPool pool(TwoRanks(absl::Seconds(40)));
  const auto answers = pool.Run("EndsBeforeAMeeting", "", absl::Seconds(20));
  EXPECT_THAT(answers[0], IsOkAndHolds(AllOf(HasSubstr("unit a"),
                                             HasSubstr("rank 1 has ended"))));
}

TEST(DeviceCommunicatorTest, WhatCannotBeAbortedEndsTheProcess) {
  RankPool pool(TwoRanks(absl::Seconds(2)));
  EXPECT_THAT(pool.Run("Endless", "stuck", absl::Seconds(20)),
              Each(StatusIs(absl::StatusCode::kUnavailable,
                            AllOf(HasSubstr("has not ended within 2s"),
                                  HasSubstr("cannot be aborted (200ms"),
                                  HasSubstr("so this process ends")))));
}

}  // namespace
}  // namespace tessera
