// A TieredBuffer on the host of a device without hardware: what a store gives
// to which stream, and who waits for it.
#include <cstdint>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "base/layout/flat_buffer.h"
#include "base/status_matchers.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/tiered_buffer.h"
#include "testing/device/test_device.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kNumel = 10000;

class HostStoreTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { testdevice::Register({}); }
  void SetUp() override {
    testdevice::SetMode(testdevice::Mode::kWorkers, 1);
    testdevice::ClearFaults();
    auto made = TieredBuffer::Allocate(kNumel, at::kFloat, device_,
                                       MemoryKind::kGradients,
                                       {Tier::kHost, nullptr}, "gradient");
    TESSERA_ASSERT_OK(made);
    buffer_ = *std::move(made);
  }
  void TearDown() override {
    buffer_.Reset();
    testdevice::CheckFreed();
    EXPECT_THAT(testdevice::Faults(), IsEmpty());
    testdevice::SetMode(testdevice::Mode::kAtOnce);
  }
  // Starts to store so many sevens.
  void Start() {
    auto memory = FlatBuffer::Allocate(kNumel, at::kFloat, device_,
                                       MemoryKind::kGradients, Fill::kNone);
    TESSERA_ASSERT_OK(memory);
    memory->View().fill_(7);
    TESSERA_ASSERT_OK(buffer_.StartStore(*std::move(memory)));
  }
  // Returns how many copies to the host streams were given, and the one of
  // kernels.
  std::pair<int64_t, int64_t> Copies() const {
    const c10::impl::VirtualGuardImpl impl(device_.type());
    const char* const what = "aten::copy_ to the host";
    return {
        testdevice::CountLaunches(what),
        testdevice::CountLaunches(what, impl.getDefaultStream(device_)),
    };
  }

  const at::Device device_ = testdevice::TestDevice(1);
  TieredBuffer buffer_;
};

TEST_F(HostStoreTest, KernelsDoNotWaitForIt) {
  const auto before = Copies();
  Start();
  const auto after = Copies();
  EXPECT_EQ(after.first, before.first + 1);
  EXPECT_EQ(after.second, before.second);
  EXPECT_EQ(buffer_.resident_bytes(), kNumel * 4);
  TESSERA_ASSERT_OK(buffer_.FinishStore());
  EXPECT_EQ(buffer_.resident_bytes(), 0);
  const HostElements host = buffer_.Host();
  EXPECT_TRUE(at::equal(host.Wait(), at::full({kNumel}, 7.0f)));
}

// The memory goes back to the stream of kernels.
TEST_F(HostStoreTest, KernelsAfterItsEndWaitForIt) {
  Start();
  TESSERA_ASSERT_OK(buffer_.FinishStore());
  const at::Tensor next =
      at::full({kNumel}, 8, at::TensorOptions(at::kFloat).device(device_));
  const at::Tensor back = at::empty_like(next);
  back.copy_(buffer_.Host().elements, /*non_blocking=*/true);
  EXPECT_TRUE(at::equal(back.cpu(), at::full({kNumel}, 7.0f)));
}

TEST_F(HostStoreTest, WhatIsDroppedMeanwhileIsNotUsedAgainBeforeItsEnd) {
  Start();
  buffer_.Reset();
  const at::Tensor next =
      at::full({kNumel}, 8, at::TensorOptions(at::kFloat).device(device_));
  EXPECT_TRUE(at::equal(next.cpu(), at::full({kNumel}, 8.0f)));
}

TEST_F(HostStoreTest, OneStoreComesAfterAnother) {
  for (int i = 0; i < 3; ++i) {
    Start();
    TESSERA_ASSERT_OK(buffer_.FinishStore());
  }
  TESSERA_ASSERT_OK(buffer_.FinishStore());  // there is none
  TESSERA_ASSERT_OK(buffer_.Raise());
  EXPECT_TRUE(at::equal(buffer_.View().cpu(), at::full({kNumel}, 7.0f)));
  buffer_.Drop();
}

}  // namespace
}  // namespace tessera
