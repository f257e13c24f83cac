// GPU tensors over Gloo and over cuda_ipc, several ranks on one GPU; and what
// nccl says to that.
#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/nccl/nccl_transport.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// The GPU that the ranks of a world use in turns.
at::Device GpuOf(const World& world) {
  return {at::kCUDA,
          static_cast<c10::DeviceIndex>(
              world.local_rank() % static_cast<int>(VisibleGpus().size()))};
}

// Each collective once, of shards of `numel` elements: what they give, one
// after the other, on the CPU.
absl::StatusOr<at::Tensor> Collectives(Communicator& comm, at::Tensor whole) {
  const int64_t numel = whole.numel() / comm.world_size();
  at::Tensor shard = torch::zeros({numel}, whole.options());
  at::Tensor all = torch::zeros_like(whole);
  TESSERA_RETURN_IF_ERROR(
      comm.ReduceScatterSum(whole, shard, {"scatter"}, /*divisor=*/3).Wait());
  TESSERA_RETURN_IF_ERROR(comm.AllGather(shard, all, {"gather"}).Wait());
  TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(whole, {"reduce"}).Wait());
  TESSERA_RETURN_IF_ERROR(comm.Broadcast(shard, 1, {"broadcast"}).Wait());
  at::Tensor moved = torch::zeros_like(whole);
  TESSERA_RETURN_IF_ERROR(comm.AllToAll(whole, moved, {"all to all"}).Wait());
  const int rank = comm.rank(), size = comm.world_size();
  TESSERA_RETURN_IF_ERROR(comm.SendReceive(shard, (rank + 1) % size,
                                           all.narrow(0, 0, numel),
                                           (rank + size - 1) % size, {"around"})
                              .Wait());
  return torch::cat({shard, all, whole, moved}).cpu();
}

// "same" if collectives of tensors of the CPU and of copies of them on the GPU
// give the same bits.
absl::StatusOr<std::string> SameOnBoth(Communicator& comm, at::Device gpu,
                                       int64_t numel) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    torch::manual_seed(comm.rank());
    const at::Tensor host =
        (torch::randn({comm.world_size() * numel}) * 1e3).to(dtype);
    // A collective that does not wait for its input would see others.
    at::Tensor copy = host.to(gpu);
    for (int i = 0; i < 20; ++i) copy.add_(1).sub_(1);
    copy.copy_(host);
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor got, Collectives(comm, copy));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor want,
                             Collectives(comm, host.clone()));
    if (std::memcmp(got.data_ptr(), want.data_ptr(), want.nbytes()) != 0) {
      return absl::StrCat("different: ", at::toString(dtype));
    }
  }
  return "same";
}

// `args`: elements of a shard.
TESSERA_RANK_FUNCTION(OnBoth) {
  int64_t numel = 0;
  if (!absl::SimpleAtoi(args, &numel)) {
    return absl::InvalidArgumentError("no number");
  }
  return SameOnBoth(*world.communicator(), GpuOf(world), numel);
}

// In subgroups, rank 0's alone and all others', which end before the next.
TESSERA_RANK_FUNCTION(OnBothInParts) {
  std::string result = "same";
  for (int i = 0; i < 3 && result == "same"; ++i) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::shared_ptr<Communicator> part,
        world.communicator()->Split(world.rank() > 0 ? 1 : 0, {"part"}));
    if (part->world_size() == 1) continue;
    TESSERA_ASSIGN_OR_RETURN(result, SameOnBoth(*part, GpuOf(world), 100003));
  }
  return result;
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(1);
    a = register_module("a", torch::nn::Linear(37, 64));
    b = register_module("b", torch::nn::Linear(64, 37));
  }
  at::Tensor Loss(const at::Tensor& x) { return b(a(x).tanh()).pow(2).mean(); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Net);

// What an engine on the GPU makes of a model's parameters, at the stage `args`.
TESSERA_RANK_FUNCTION(TrainOnGpu) {
  int stage = 0;
  if (!absl::SimpleAtoi(args, &stage)) {
    return absl::InvalidArgumentError("no stage");
  }
  const at::Device gpu = GpuOf(world);
  Net net;
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(4);
  config.set_gradient_clipping(0.1);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(stage);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  EngineOptions options;
  options.device = gpu;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(net.ptr(), config, options));
  torch::manual_seed(10 + world.rank());
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = torch::randn({4, 37}).to(gpu);
    TESSERA_RETURN_IF_ERROR(engine->Backward(net->Loss(x)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_ASSIGN_OR_RETURN(const Record record, ParametersOf(*engine, *net));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return ToText(record);
}

class GpuRanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (VisibleGpus().empty()) GTEST_SKIP() << "no GPU";
  }
  static RankPoolOptions Over(const std::string& backend, int ranks) {
    RankPoolOptions options;
    options.world_size = ranks;
    options.backend = backend;
    return options;
  }
};

TEST_F(GpuRanksTest, GlooCarriesGpuTensors) {
  for (int w : {2, 3}) {
    RankPool pool(Over("gloo", w));
    EXPECT_THAT(pool.Run("OnBoth", "1000"), Each(IsOkAndHolds("same")));
  }
}

// Of one chunk, and of many.
TEST_F(GpuRanksTest, CudaIpcCarriesGpuTensors) {
  for (int w : {2, 3}) {
    RankPool pool(Over("cuda_ipc", w));
    for (const char* numel : {"1", "1000", "10000019"}) {
      EXPECT_THAT(pool.Run("OnBoth", numel), Each(IsOkAndHolds("same")))
          << w << " ranks, " << numel;
    }
  }
}

TEST_F(GpuRanksTest, CudaIpcInSubgroups) {
  RankPool pool(Over("cuda_ipc", 3));
  EXPECT_THAT(pool.Run("OnBothInParts", ""), Each(IsOkAndHolds("same")));
}

// The engine's bits do not depend on what carries its tensors.
TEST_F(GpuRanksTest, TrainingOverCudaIpcIsTrainingOverGloo) {
  RankPool gloo(Over("gloo", 2)), ipc(Over("cuda_ipc", 2));
  for (const char* stage : {"1", "2", "3"}) {
    const auto want = gloo.Run("TrainOnGpu", stage);
    TESSERA_ASSERT_OK(want[0].status());
    EXPECT_THAT(ipc.Run("TrainOnGpu", stage), Each(IsOkAndHolds(*want[0])))
        << "stage " << stage;
  }
}

TEST_F(GpuRanksTest, NcclRefusesASharedGpu) {
  if (VisibleGpus().size() != 1) GTEST_SKIP() << "needs exactly one GPU";
  RankPool pool(Over("nccl", 2));
  EXPECT_THAT(pool.Run("OnBoth", "1000"),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("would use the same GPU"))));
}

}  // namespace
}  // namespace tessera
