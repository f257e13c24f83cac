// What the communicator over c10d's NCCL does, with c10d's Gloo in NCCL's
// place: it too matches collectives by their order alone, and of one kind and
// size lets any two pass.
#include "comm/nccl/device_communicator.h"

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/device_gloo.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Gloo = c10d::ProcessGroupGloo;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr absl::Duration kPatience = absl::Milliseconds(200);

// Its collectives end as Gloo's do, but it cannot be aborted.
class StuckGloo : public Gloo {
 public:
  using Gloo::Gloo;
  void abort() override {
    while (true) pause();
  }
};

DeviceCommunicatorOptions OptionsOf(const World& world) {
  DeviceCommunicatorOptions options;
  options.rank = world.rank();
  options.world_size = world.world_size();
  options.collective_timeout = absl::Seconds(40);
  options.announce_grace = absl::Seconds(1);
  options.backend = "gloo in nccl's place";
  options.abort_patience = kPatience;
  return options;
}

// The ranks of `world`, over a Gloo of their own; `folder` is one of their own.
// On the device without hardware where options.device is one.
template <typename Backend = Gloo>
absl::StatusOr<std::shared_ptr<Communicator>> Connect(
    const DeviceCommunicatorOptions& options, absl::string_view folder) {
  const Store store = c10::make_intrusive<c10d::FileStore>(
      absl::StrCat(folder, "/store"), options.world_size);
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, /*same_host=*/true));
  auto gloo = Gloo::Options::create(std::chrono::seconds(40));
  gloo->threads = 2;
  gloo->devices.push_back(
      Gloo::createDeviceForHostname("127.0.0.1", /*lazyInit=*/false));
  c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<Backend>(
      c10::make_intrusive<c10d::PrefixStore>("gloo", store), options.rank,
      options.world_size, gloo);
  if (!options.device.is_cpu()) {
    backend =
        c10::make_intrusive<DeviceGloo>(std::move(backend), options.device);
  }
  return MakeDeviceCommunicator(options, std::move(domain), backend);
}

// Of rank `rank`, from element `begin` on.
at::Tensor Values(int rank, int64_t numel, int64_t begin = 0) {
  return SumInOrder({rank}, begin, numel, at::kFloat);
}

absl::Status CheckCollectives(const World& world, Communicator& comm,
                              at::Device device) {
  constexpr int64_t kNumel = 1001;
  const int size = world.world_size();
  std::vector<int> ranks;
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(r);
    all.push_back(Values(r, kNumel));
  }
  const at::Tensor mine = Values(world.rank(), kNumel).to(device);
  at::Tensor whole = torch::zeros({size * kNumel}, device);
  TESSERA_RETURN_IF_ERROR(comm.AllGather(mine, whole, {"gather"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole.cpu(), torch::cat(all), "gather"));

  at::Tensor shard = torch::zeros({kNumel}, device);
  TESSERA_RETURN_IF_ERROR(
      comm.ReduceScatterSum(Values(world.rank(), size * kNumel).to(device),
                            shard, {"scatter"})
          .Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      shard.cpu(), SumInOrder(ranks, world.rank() * kNumel, kNumel, at::kFloat),
      "scatter"));

  at::Tensor sum = mine.clone();
  TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(sum, {"reduce"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      sum.cpu(), SumInOrder(ranks, 0, kNumel, at::kFloat), "reduce"));

  at::Tensor root = mine.clone();
  TESSERA_RETURN_IF_ERROR(comm.Broadcast(root, 1, {"broadcast"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(root.cpu(), all[1], "broadcast"));

  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      comm.AllGatherStrings(std::string(world.rank() * 300, 'x'), {"texts"}));
  for (int r = 0; r < size; ++r) {
    if (texts[r] != std::string(r * 300, 'x')) {
      return absl::InternalError(absl::StrCat("text of rank ", r));
    }
  }
  return absl::OkStatus();
}

// Summed in float32, rounded once, divided, rounded again.
absl::Status CheckHalves(const World& world, Communicator& comm,
                         at::Device device) {
  constexpr int64_t kNumel = 1001;
  std::vector<int> ranks;
  for (int r = 0; r < world.world_size(); ++r) ranks.push_back(r);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor whole =
        SumInOrder({world.rank()}, 0, world.world_size() * kNumel, dtype)
            .to(device);
    at::Tensor shard = torch::zeros({kNumel}, whole.options());
    TESSERA_RETURN_IF_ERROR(
        comm.ReduceScatterSum(whole, shard, {"halves"}, /*divisor=*/3).Wait());
    TESSERA_RETURN_IF_ERROR(ExpectBits(
        shard.cpu(),
        SumInOrder(ranks, world.rank() * kNumel, kNumel, dtype).div(3),
        "halves"));
  }
  return absl::OkStatus();
}

// "folder device": "cpu"; "once" and "workers", a device's modes.
TESSERA_RANK_FUNCTION(Collectives) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  DeviceCommunicatorOptions options = OptionsOf(world);
  options.ordered_sum = [](const at::Tensor& slices, double divisor,
                           const at::Tensor& sum) {
    AddSlices(slices, divisor, sum);
    return absl::OkStatus();
  };
  if (words[1] != "cpu") {
    testdevice::Register({});
    testdevice::SetMode(words[1] == "once" ? testdevice::Mode::kAtOnce
                                           : testdevice::Mode::kWorkers);
    testdevice::ClearFaults();
    options.device = testdevice::TestDevice(1);
  }
  {
    TESSERA_ASSIGN_OR_RETURN(const auto comm, Connect(options, words[0]));
    for (int i = 0; i < 3; ++i) {
      TESSERA_RETURN_IF_ERROR(CheckCollectives(world, *comm, options.device));
    }
    TESSERA_RETURN_IF_ERROR(CheckHalves(world, *comm, options.device));
  }
  if (words[1] == "cpu") return "ok";
  testdevice::CheckFreed();
  const auto faults = testdevice::Faults();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  return faults.empty() ? "ok" : faults[0].message;
}

class CollectivesTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CollectivesTest, AreRightAndInOrder) {
  const TempFolder folder;
  EXPECT_THAT(RankPool::Get(3)->Run(
                  "Collectives", absl::StrCat(folder.path(), " ", GetParam())),
              Each(IsOkAndHolds("ok")));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesTest,
                         ::testing::Values("cpu", "once", "workers"),
                         [](const auto& info) { return info.param; });

// What the collective of this rank ends with. `kind` "gather": of one size on
// all ranks, of another unit on each; "kind": a gather on rank 0, a sum on the
// others. (Of other sizes Gloo itself ends the process.)
TESSERA_RANK_FUNCTION(DifferentCollectives) {
  const std::pair<absl::string_view, absl::string_view> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  TESSERA_ASSIGN_OR_RETURN(const auto comm,
                           Connect(OptionsOf(world), words.second));
  TESSERA_RETURN_IF_ERROR(comm->Barrier("before"));
  const bool first = world.rank() == 0;
  const std::string unit = first ? "unit a" : "unit b";
  const at::Tensor shard = torch::full({1000}, 1.0 * world.rank());
  at::Tensor whole = torch::zeros({world.world_size() * 1000});
  const CommFuture end = !first && words.first == "kind"
                             ? comm->AllReduceSum(whole, {unit})
                             : comm->AllGather(shard, whole, {unit});
  return end.Wait().ToString();
}

class DifferentTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DifferentTest, RanksInDifferentCollectivesAreToldOfBoth) {
  const TempFolder folder;
  EXPECT_THAT(
      RankPool::Get(2)->Run("DifferentCollectives",
                            absl::StrCat(GetParam(), " ", folder.path()),
                            absl::Seconds(20)),
      Each(IsOkAndHolds(AllOf(HasSubstr("different collectives"),
                              HasSubstr("unit a"), HasSubstr("unit b"),
                              HasSubstr("rank 0"), HasSubstr("rank 1")))));
}

INSTANTIATE_TEST_SUITE_P(All, DifferentTest,
                         ::testing::Values("gather", "kind"),
                         [](const auto& info) { return info.param; });

TESSERA_RANK_FUNCTION(CannotBeAborted) {
  TESSERA_ASSIGN_OR_RETURN(const auto comm,
                           Connect<StuckGloo>(OptionsOf(world), args));
  at::Tensor whole = torch::zeros({world.world_size()});
  return comm
      ->AllGather(torch::ones({1}), whole,
                  {world.rank() == 0 ? "unit a" : "unit b"})
      .Wait()
      .ToString();
}

TEST(DeviceCommunicatorTest, WhatCannotBeAbortedEndsTheProcess) {
  const TempFolder folder;
  RankPool pool({});
  EXPECT_THAT(pool.Run("CannotBeAborted", folder.path(), absl::Seconds(20)),
              Each(StatusIs(absl::StatusCode::kUnavailable,
                            AllOf(HasSubstr("different collectives"),
                                  HasSubstr("cannot be aborted (200ms"),
                                  HasSubstr("so this process ends")))));
}

}  // namespace
}  // namespace tessera
