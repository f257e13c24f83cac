#include "offload/pinned_buffer.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/memory/ledger.h"
#include "base/status_matchers.h"
#include "base/stream/stream_point.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMiB = int64_t{1} << 20;

class PinnedBufferTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { testdevice::Register({}); }
  void SetUp() override {
    testdevice::SetMode(testdevice::Mode::kWorkers, 1);
    testdevice::ClearFaults();
    testdevice::ResetHostWaits();
  }
  void TearDown() override {
    EXPECT_EQ(PinnedChunkBytes(), 0);
    EXPECT_THAT(testdevice::Faults(), IsEmpty());
    testdevice::SetMode(testdevice::Mode::kAtOnce);
  }
  static PinnedBuffer Allocate(int64_t numel,
                               at::ScalarType dtype = at::kFloat) {
    auto made = PinnedBuffer::Allocate(numel, dtype, MemoryKind::kOptimizer);
    TESSERA_EXPECT_OK(made);
    return *std::move(made);
  }
  static int64_t Claimed() {
    return MemoryLedger::Host().Report()[MemoryKind::kOptimizer].current_bytes;
  }
};

// libtorch rounds each up to a power of two: 33 of 64, 17 of 32.
TEST_F(PinnedBufferTest, AModelsBuffersTakeLittleMoreThanTheyHold) {
  std::vector<PinnedBuffer> all;
  int64_t bytes = 0;
  for (int i = 0; i < 60; ++i) {
    const int64_t numel = (i % 3 == 0 ? 33 : 17) * kMiB / 64 + i;
    all.push_back(Allocate(numel));
    bytes += numel * 4;
    EXPECT_TRUE(all.back().View().is_pinned());
    EXPECT_EQ(all.back().View().numel(), numel);
  }
  EXPECT_LE(PinnedChunkBytes(), bytes * 5 / 4);
  EXPECT_EQ(Claimed(), bytes);
}

TEST_F(PinnedBufferTest, NoTwoLieInOnePlace) {
  std::vector<std::optional<PinnedBuffer>> all;
  const auto fill = [&](size_t i) {
    EXPECT_TRUE(at::equal(all[i]->View(), at::zeros_like(all[i]->View())));
    all[i]->View().fill_(static_cast<double>(i) + 1);
  };
  for (size_t i = 0; i < 50; ++i) {
    all.emplace_back(Allocate(static_cast<int64_t>(1 + 1777 * i * i % 200000),
                              i % 2 == 0 ? at::kFloat : at::kBFloat16));
    fill(i);
  }
  for (size_t i = 0; i < 50; i += 3) all[i].reset();
  for (size_t i = 0; i < 50; i += 3) {
    all[i] = Allocate(static_cast<int64_t>(1 + 991 * i * i % 150000));
    fill(i);
  }
  for (size_t i = 0; i < 50; ++i) {
    const at::Tensor view = all[i]->View();
    EXPECT_TRUE(
        at::equal(view, at::full_like(view, static_cast<double>(i) + 1)));
  }
}

// A device that still writes to what was freed is waited for by who gets that.
TEST_F(PinnedBufferTest, WhatIsUsedAgainIsNotUsedByADevice) {
  const at::Device device = testdevice::TestDevice(0);
  const PinnedBuffer other = Allocate(100);  // so that the chunk stays
  PinnedBuffer first = Allocate(1000);
  const char* const place = first.data();
  const at::Tensor sevens = at::full({1000}, 7, device);
  first.View().copy_(sevens, /*non_blocking=*/true);
  first.Reset({StreamPoint::Now(device)});
  EXPECT_EQ(testdevice::CountHostWaits(), 0);
  const PinnedBuffer second = Allocate(1000);
  ASSERT_EQ(second.data(), place);
  testdevice::NoteHostAccess("zero", {place, 4000, /*writes=*/true});
  EXPECT_TRUE(at::equal(second.View(), at::zeros({1000})));
}

TEST_F(PinnedBufferTest, TheLedgersLimitIsNamed) {
  const int64_t before = MemoryLedger::Host().limit_bytes();
  MemoryLedger::Host().SetLimit(MemoryLedger::Host().total().current_bytes +
                                1000);
  EXPECT_THAT(
      PinnedBuffer::Allocate(1000, at::kFloat, MemoryKind::kOptimizer),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("optimizer")));
  EXPECT_EQ(Claimed(), 0);
  MemoryLedger::Host().SetLimit(before);
}

}  // namespace
}  // namespace tessera
