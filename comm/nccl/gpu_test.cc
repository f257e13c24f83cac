// What needs a GPU, and one is enough: the kernel, and NCCL with one rank.
#include "gtest/gtest.h"

#ifdef TESSERA_HAS_CUDA
#include <cuda_runtime.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "comm/capabilities.h"
#include "comm/comm_thread.h"
#include "comm/device/open_backend.h"
#include "comm/group/group_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/nccl/nccl_transport.h"
#include "comm/reduce/ordered_sum.h"
#include "comm/watch/failure_domain.h"
#include "gmock/gmock.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (VisibleGpus().empty()) GTEST_SKIP() << "no GPU";
  }
};

// Returns values of mixed magnitude, so that the order of a sum shows in its
// bits.
at::Tensor Values(int64_t numel, at::ScalarType dtype) {
  const at::Tensor scale =
      torch::pow(10.0, torch::randint(-4, 5, {numel}, at::kDouble));
  return (torch::randn({numel}, at::kDouble) * scale).to(dtype);
}

template <typename T>
void ExpectSameAsCpu(int slices, int64_t numel, double divisor) {
  const at::Tensor host =
      Values(slices * numel, c10::CppTypeToScalarType<T>::value);
  at::Tensor want = torch::empty({numel}, host.dtype());
  OrderedSumCpu(host.data_ptr<T>(), slices, numel, divisor, want.data_ptr<T>());
  at::Tensor device = host.to(at::kCUDA);
  // In the place of slice 0.
  EXPECT_EQ(OrderedSumCuda(device.data_ptr<T>(), slices, numel, divisor,
                           device.data_ptr<T>(), nullptr),
            0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const at::Tensor got = device.narrow(0, 0, numel).cpu();
  EXPECT_EQ(std::memcmp(got.data_ptr(), want.data_ptr(), want.nbytes()), 0)
      << slices << " " << numel;
}

TEST_F(GpuTest, OrderedSumHasTheBitsOfTheCpu) {
  torch::manual_seed(1);
  for (int slices : {1, 2, 3, 8}) {
    for (int64_t numel : {1, 255, 257, 3000017}) {
      for (double divisor : {1.0, 3.0}) {
        ExpectSameAsCpu<float>(slices, numel, divisor);
        ExpectSameAsCpu<double>(slices, numel, divisor);
        ExpectSameAsCpu<c10::BFloat16>(slices, numel, divisor);
        ExpectSameAsCpu<c10::Half>(slices, numel, divisor);
      }
    }
  }
}

TEST_F(GpuTest, NamesGpus) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_THAT(VisibleGpus(), SizeIs(count));
}

TEST_F(GpuTest, NcclOfOneRank) {
  if (!BuiltWithNccl()) GTEST_SKIP() << "no NCCL in this build";
  for (bool ordered : {true, false}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    GroupOptions group;
    group.world_size = 1;
    NcclOptions options;
    options.ordered_sums = ordered;
    options.sums_apart = true;
    TESSERA_ASSERT_OK_AND_ASSIGN(
        group.domain, FailureDomain::Join(store, group, /*same_host=*/true));
    const auto host = std::dynamic_pointer_cast<GroupCommunicator>(
        MakeSelfCommunicator(group));
    TESSERA_ASSERT_OK_AND_ASSIGN(
        auto transport,
        ConnectNcclTransport(store, options, host->transport()));
    EXPECT_EQ(transport->capabilities().sums_in_rank_order, ordered);
    TESSERA_ASSERT_OK_AND_ASSIGN(
        auto comm, GroupCommunicator::Create(group, {}, group.domain,
                                             std::move(transport)));
    for (at::DeviceType where : {at::kCUDA, at::kCPU}) {
      const at::Tensor a = torch::arange(5, at::kFloat).to(where);
      at::Tensor b = torch::zeros_like(a);
      TESSERA_EXPECT_OK(comm->AllGather(a, b, {"gather"}).Wait());
      EXPECT_TRUE(torch::equal(a, b));
      b.zero_();
      TESSERA_EXPECT_OK(comm->ReduceScatterSum(a, b, {"scatter"}).Wait());
      EXPECT_TRUE(torch::equal(a, b));
      TESSERA_EXPECT_OK(comm->AllReduceSum(b, {"reduce"}).Wait());
      TESSERA_EXPECT_OK(comm->Broadcast(b, 0, {"broadcast"}).Wait());
      EXPECT_TRUE(torch::equal(a, b));
      b.zero_();
      TESSERA_EXPECT_OK(comm->AllToAll(a, b, {"all to all"}).Wait());
      EXPECT_TRUE(torch::equal(a, b));
      b.zero_();
      TESSERA_EXPECT_OK(comm->SendReceive(a, 0, b, 0, {"to itself"}).Wait());
      EXPECT_TRUE(torch::equal(a, b));
    }
    EXPECT_THAT(comm->AllGatherStrings("words", {"names"}),
                IsOkAndHolds(ElementsAre("words")));
    TESSERA_EXPECT_OK(comm->AgreeOk(absl::OkStatus(), "here"));
    testing::internal::CaptureStderr();
    comm = nullptr;
    CommThread::Get().Stop();
    CommThread::OfDevices().Stop();
    CloseOpenBackends();
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                AllOf(Not(HasSubstr("destroy_process_group")),
                      Not(HasSubstr("closed"))));
  }
}

}  // namespace
}  // namespace tessera
#endif  // TESSERA_HAS_CUDA
