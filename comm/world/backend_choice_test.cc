#include "comm/world/backend_choice.h"

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(RankInfoTest, RoundTrip) {
  const RankInfo info =
      RankInfo::Decode(RankInfo{"boot host", {"g0", "g1"}}.Encode());
  EXPECT_EQ(info.host, "boot host");
  EXPECT_THAT(info.gpus, ElementsAre("g0", "g1"));
  EXPECT_THAT(RankInfo::Decode(RankInfo{"h", {}}.Encode()).gpus, IsEmpty());
  const RankInfo all = RankInfo::Decode(
      RankInfo{"h", {"g"}, "net:[1]", "10.0.0.1", "0-3,8", "m", "b", "id"}
          .Encode());
  EXPECT_EQ(all.network, "net:[1]");
  EXPECT_EQ(all.address, "10.0.0.1");
  EXPECT_EQ(all.cpus, "0-3,8");
  EXPECT_EQ(all.memory_group, "m");
  EXPECT_EQ(all.build, "b");
  EXPECT_EQ(all.build_id, "id");
  EXPECT_THAT(all.gpus, ElementsAre("g"));
}

TEST(FindNeighboursTest, CountsRanksOfTheSameHost) {
  const std::vector<RankInfo> infos = {
      {"a", {}}, {"b", {}}, {"a", {}}, {"b", {}}, {"b", {}}};
  EXPECT_EQ(FindNeighbours(infos, 2).local_rank, 1);
  EXPECT_EQ(FindNeighbours(infos, 2).local_world_size, 2);
  EXPECT_EQ(FindNeighbours(infos, 4).local_rank, 2);
  EXPECT_EQ(FindNeighbours(infos, 4).local_world_size, 3);
  EXPECT_FALSE(FindNeighbours(infos, 0).same_host);
  EXPECT_TRUE(FindNeighbours({{"a", {}}, {"a", {}}}, 1).same_host);
  EXPECT_THAT(FindNeighbours(infos, 4).local_ranks, ElementsAre(1, 3, 4));
}

TEST(FindNeighboursTest, NetworksOfOneHostHaveNoCommonLoopback) {
  const Neighbours two =
      FindNeighbours({{"a", {}, "net1"}, {"a", {}, "net2"}}, 1);
  EXPECT_FALSE(two.same_host);
  // They share its processors and GPUs nevertheless.
  EXPECT_EQ(two.local_world_size, 2);
  EXPECT_EQ(two.local_rank, 1);
}

TEST(ChooseBackendTest, NcclWhereEveryRankHasItsOwnGpu) {
  const std::vector<RankInfo> own = {
      {"a", {"g0", "g1"}}, {"a", {"g0", "g1"}}, {"b", {"g0"}}};
  EXPECT_EQ(DeviceOf(own, 1), 1);
  EXPECT_EQ(GpuOf(own, 1, "auto", true), 1);
  EXPECT_EQ(GpuOf(own, 1, "nccl", true), 1);
  EXPECT_EQ(GpuOf(own, 1, "gloo", true), -1);
  EXPECT_EQ(GpuOf(own, 1, "auto", false), -1);
  EXPECT_EQ(DeviceOf(own, 2), 0);
  EXPECT_THAT(ChooseBackend(own, "auto", true), IsOkAndHolds("nccl"));
  EXPECT_THAT(ChooseBackend(own, "nccl", true), IsOkAndHolds("nccl"));
  EXPECT_THAT(ChooseBackend(own, "gloo", true), IsOkAndHolds("gloo"));
  EXPECT_THAT(ChooseBackend(own, "auto", false), IsOkAndHolds("hierarchical"));
}

TEST(ChooseBackendTest, RanksThatSeeOneGpuEach) {
  const std::vector<RankInfo> own = {{"a", {"g0"}}, {"a", {"g1"}}};
  EXPECT_EQ(DeviceOf(own, 1), 0);
  EXPECT_EQ(GpuOf(own, 1, "auto", true), 0);
  EXPECT_THAT(ChooseBackend(own, "auto", true), IsOkAndHolds("nccl"));
}

TEST(ChooseBackendTest, ShmOnOneHostAndInOneNetworkNamespaceOnly) {
  std::vector<RankInfo> infos(2);
  infos[0].host = infos[1].host = "a";
  infos[0].network = infos[1].network = "n";
  EXPECT_THAT(ChooseBackend(infos, "auto", false), IsOkAndHolds("shm"));
  EXPECT_THAT(ChooseBackend(infos, "shm", false), IsOkAndHolds("shm"));
  infos[1].network = "other";
  EXPECT_THAT(ChooseBackend(infos, "auto", false), IsOkAndHolds("gloo"));
  EXPECT_THAT(
      ChooseBackend(infos, "shm", false),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("or gloo")));
}

TEST(ChooseBackendTest, HierarchicalWhereSomeRanksShareAHost) {
  std::vector<RankInfo> infos = {{"a", {}}, {"b", {}}, {"a", {}}};
  EXPECT_THAT(MemoryGroups(infos), ElementsAre(0, 1, 0));
  EXPECT_THAT(ChooseBackend(infos, "auto", false),
              IsOkAndHolds("hierarchical"));
  EXPECT_THAT(ChooseBackend(infos, "gloo", false), IsOkAndHolds("gloo"));
  infos[0].memory_group = "other";
  EXPECT_THAT(MemoryGroups(infos), ElementsAre(0, 1, 2));
  EXPECT_THAT(ChooseBackend(infos, "auto", false), IsOkAndHolds("gloo"));
  EXPECT_THAT(ChooseBackend(infos, "hierarchical", false),
              IsOkAndHolds("hierarchical"));
}

TEST(BackendOfSubgroupTest, IsTheWholesOrWhatFitsTheHosts) {
  const RankInfo a{"a", {}}, b{"b", {}};
  EXPECT_EQ(BackendOfSubgroup("gloo", {a, a}), "gloo");
  EXPECT_EQ(BackendOfSubgroup("shm", {a, a}), "shm");
  EXPECT_EQ(BackendOfSubgroup("nccl", {a, b}), "nccl");
  EXPECT_EQ(BackendOfSubgroup("nccl", {a}), "self");
  EXPECT_EQ(BackendOfSubgroup("cuda_ipc", {a, a}), "cuda_ipc");
  EXPECT_EQ(BackendOfSubgroup("cuda_ipc", {a}), "self");
  EXPECT_EQ(BackendOfSubgroup("hierarchical", {a, a}), "shm");
  EXPECT_EQ(BackendOfSubgroup("hierarchical", {a, b}), "gloo");
  EXPECT_EQ(BackendOfSubgroup("hierarchical", {a, b, b}), "hierarchical");
  EXPECT_EQ(BackendOfSubgroup("hierarchical", {b}), "self");
}

TEST(ChooseBackendTest, SharedGpuIsRefusedWithTheFix) {
  const std::vector<RankInfo> shared = {
      {"a", {"g0", "g1"}}, {"a", {"g0", "g1"}}, {"a", {"g0", "g1"}}};
  EXPECT_THAT(ChooseBackend(shared, "auto", true), IsOkAndHolds("shm"));
  EXPECT_THAT(ChooseBackend(shared, "nccl", true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("ranks 0 and 2 would use the same GPU"),
                             HasSubstr("take backend cuda_ipc"),
                             HasSubstr("or gloo"))));
}

TEST(ChooseBackendTest, CudaIpcByNameWhereRanksOfOneHostSeeGpus) {
  std::vector<RankInfo> infos = {
      {"a", {"g0", "g1"}}, {"a", {"g0", "g1"}}, {"a", {"g0", "g1"}}};
  EXPECT_THAT(ChooseBackend(infos, "cuda_ipc", true), IsOkAndHolds("cuda_ipc"));
  EXPECT_EQ(GpuOf(infos, 1, "cuda_ipc", true), 1);
  EXPECT_EQ(GpuOf(infos, 2, "cuda_ipc", true), 0);
  EXPECT_EQ(GpuOf(infos, 2, "auto", true), -1);
  EXPECT_THAT(
      ChooseBackend(infos, "cuda_ipc", false),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("backend cuda_ipc: this program was built without")));
  infos[1].network = "other";
  EXPECT_THAT(
      ChooseBackend(infos, "cuda_ipc", true),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("not all on one host"), HasSubstr("gloo"))));
  infos[2].gpus.clear();
  EXPECT_EQ(GpuOf(infos, 0, "cuda_ipc", true), -1);
  EXPECT_THAT(ChooseBackend(infos, "cuda_ipc", true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("backend cuda_ipc: rank 2 sees no GPU"),
                             HasSubstr("take backend gloo"))));
}

TEST(ChooseBackendTest, RefusesByName) {
  const std::vector<RankInfo> none = {{"a", {"g0"}}, {"a", {}}};
  EXPECT_EQ(DeviceOf(none, 1), -1);
  EXPECT_EQ(GpuOf(none, 0, "auto", true), -1);
  EXPECT_THAT(ChooseBackend(none, "auto", true), IsOkAndHolds("shm"));
  EXPECT_THAT(ChooseBackend(none, "nccl", true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 1 sees no GPU")));
  EXPECT_THAT(
      ChooseBackend(none, "nccl", false),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without CUDA")));
  EXPECT_THAT(
      ChooseBackend(none, "mpi", true),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("backend 'mpi'")));
}

}  // namespace
}  // namespace tessera
