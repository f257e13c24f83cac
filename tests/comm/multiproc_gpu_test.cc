// GPU tensors over Gloo, several ranks on one GPU; and what nccl says to that.
#include <cstring>

#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/nccl/nccl_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Every collective on CPU tensors and on copies of them on the GPU.
TESSERA_RANK_FUNCTION(SameOnBoth) {
  Communicator& comm = *world.communicator();
  const int64_t w = world.world_size();
  torch::manual_seed(world.rank());
  const at::Tensor host = torch::randn({w * 1000}) * 1e3;
  at::Tensor results[2];
  for (int k = 0; k < 2; ++k) {
    at::Tensor whole = host.to(k == 0 ? at::kCPU : at::kCUDA, false, true);
    at::Tensor shard = torch::zeros({1000}, whole.options());
    at::Tensor all = torch::zeros_like(whole);
    TESSERA_RETURN_IF_ERROR(
        comm.ReduceScatterSum(whole, shard, {"scatter"}).Wait());
    TESSERA_RETURN_IF_ERROR(comm.AllGather(shard, all, {"gather"}).Wait());
    TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(whole, {"reduce"}).Wait());
    TESSERA_RETURN_IF_ERROR(comm.Broadcast(shard, 1, {"broadcast"}).Wait());
    results[k] = torch::cat({shard, all, whole}).cpu();
  }
  return std::memcmp(results[0].data_ptr(), results[1].data_ptr(),
                     results[0].nbytes()) == 0
             ? "same"
             : "different";
}

TEST(GpuRanksTest, GlooCarriesGpuTensors) {
  if (VisibleGpus().empty()) GTEST_SKIP() << "no GPU";
  for (int w : {2, 3}) {
    EXPECT_THAT(RankPool::Get(w)->Run("SameOnBoth", ""),
                Each(IsOkAndHolds("same")));
  }
}

TEST(GpuRanksTest, NcclRefusesASharedGpu) {
  if (VisibleGpus().size() != 1) GTEST_SKIP() << "needs exactly one GPU";
  RankPool pool({.world_size = 2, .backend = "nccl"});
  EXPECT_THAT(pool.Run("SameOnBoth", ""),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("would use the same GPU"))));
}

}  // namespace
}  // namespace tessera
