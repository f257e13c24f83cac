#include "testing/device/test_device.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/device_testing.h"

namespace testdevice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = Fault::Kind;

auto FaultOf(Kind kind) { return Field(&Fault::kind, kind); }

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}
c10::Stream FromPool(int device) {
  return Impl().getStreamFromGlobalPool(TestDevice(device));
}
c10::Stream Current(int device) { return Impl().getStream(TestDevice(device)); }

// `second` waits for what `first` has by now.
void Wait(c10::Stream first, c10::Stream second) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(first);
  event.block(second);
}

// ---- order

INSTANTIATE_TEST_SUITE_P(Modes, TestDeviceTest,
                         ::testing::Values(Mode::kAtOnce, Mode::kWorkers),
                         [](const auto& info) {
                           return info.param == Mode::kAtOnce ? "AtOnce"
                                                              : "Workers";
                         });

TEST_P(TestDeviceTest, AMissingWaitIsFound) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  {
    const c10::StreamGuard guard(side);
    const at::Tensor y = x + 1;
    ASSERT_THAT(Faults(), Not(IsEmpty()));
    EXPECT_THAT(
        Faults()[0],
        AllOf(FaultOf(Kind::kReadTooEarly),
              Field(&Fault::message,
                    AllOf(HasSubstr("aten::add"), HasSubstr("aten::fill_"),
                          HasSubstr("its argument self Float [100]"),
                          HasSubstr("the default stream of device 1"),
                          HasSubstr("stream ")))));
  }
}

TEST_P(TestDeviceTest, WhatAnOperatorReturnsIsWritten) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  Wait(Current(1), side);
  const at::Tensor y = at::layer_norm(x, {100});  // has no out= of its own
  EXPECT_THAT(Faults(), IsEmpty());
  const c10::StreamGuard guard(side);
  const at::Tensor z = y * 2;
  ASSERT_THAT(Faults(), Not(IsEmpty()));
  EXPECT_THAT(Faults()[0].message,
              HasSubstr("wait for aten::native_layer_norm on the default"));
}

TEST_P(TestDeviceTest, AWaitIsEnough) {
  const c10::Stream side = FromPool(1);
  const at::Tensor x = at::ones({100}, TestDevice(1));
  Wait(Current(1), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  Wait(side, Current(1));
  EXPECT_TRUE(HasBits(y + x, at::full({100}, 3.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, FreedTooEarlyIsFound) {
  const c10::Stream side = FromPool(0);
  at::Tensor x = at::ones({100}, TestDevice(0));
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  x.reset();
  at::empty({7}, TestDevice(0));
  EXPECT_THAT(Faults(), ElementsAre(FaultOf(Kind::kReusedTooEarly)));
}

TEST_P(TestDeviceTest, RecordStreamKeepsMemory) {
  const c10::Stream side = FromPool(0);
  at::Tensor x = at::ones({100}, TestDevice(0));
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
    x.record_stream(side);
  }
  x.reset();
  for (int i = 0; i < 10; ++i) at::zeros({100}, TestDevice(0));
  Wait(side, Current(0));
  EXPECT_TRUE(HasBits(y, at::full({100}, 2.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, WhatIsNoOperator) {
  const c10::Stream side = FromPool(0);
  const at::Tensor x = at::ones({100}, TestDevice(0));
  float* const data = x.mutable_data_ptr<float>();
  const std::vector<Region> regions = {
      {data, static_cast<int64_t>(x.nbytes()), true}};
  const auto work = [data] { OnHost(data)[3] = 5; };
  Launch(side, "kernel", regions, work);
  ASSERT_THAT(Faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
  EXPECT_THAT(Faults()[0].message, HasSubstr("kernel on stream"));
  ClearFaults();
  Wait(Current(0), side);
  Launch(side, "kernel", regions, work);
  Wait(side, Current(0));
  EXPECT_EQ(5, x[3].item<float>());
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, TensorsOfTwoDevicesAreFound) {
  // Allocated by device 0, although it is said to be of device 1.
  c10::DataPtr memory =
      c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(64);
  memory.unsafe_set_device(TestDevice(1));
  const at::Tensor x = at::empty({0}, TestDevice(1));
  x.storage().set_data_ptr_noswap(std::move(memory));
  x.storage().set_nbytes(64);
  x.unsafeGetTensorImpl()->set_sizes_contiguous({16});
  x.fill_(1);
  ASSERT_THAT(Faults(), Not(IsEmpty()));
  EXPECT_THAT(Faults()[0], FaultOf(Kind::kOtherDevice));
}

// ---- the host

TEST_P(TestDeviceTest, BlockingCopiesAndValuesWaitAndAreCounted) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  EXPECT_EQ(0, CountHostWaits());
  EXPECT_EQ(3, x.sum().item<float>());
  EXPECT_EQ(1, CountHostWaits());
  x.cpu();
  EXPECT_EQ(2, CountHostWaits());
  at::ones({3}).to(TestDevice(0));
  EXPECT_EQ(3, CountHostWaits());
  Current(0).synchronize();
  EXPECT_EQ(4, CountHostWaits());
  EXPECT_THAT(HostWaits(), ::testing::Contains(
                               Field(&HostWaited::what, "synchronize stream")));
}

TEST_P(TestDeviceTest, CopiesToPinnedMemoryDoNotWait) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  const at::Tensor pinned =
      at::zeros({3}, at::TensorOptions().pinned_memory(true));
  ASSERT_TRUE(pinned.is_pinned());
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(0, CountHostWaits());
  const Region all = {pinned.const_data_ptr(), 12, false};
  NoteHostAccess("print", all);
  EXPECT_THAT(Faults(), ElementsAre(FaultOf(Kind::kHostAccessTooEarly)));
  ClearFaults();
  Current(0).synchronize();
  NoteHostAccess("print", all);
  EXPECT_THAT(Faults(), IsEmpty());
  EXPECT_TRUE(at::equal(pinned, at::ones({3})));
}

// The task itself frees it if the program has let go of it: another stream may
// wait for that task.
TEST_P(TestDeviceTest, PinnedMemoryIsFreedByATask) {
  const at::Tensor x = at::ones({3}, TestDevice(1));
  const c10::Stream side = FromPool(1);
  Launch(Current(1), "late", {},
         [] { absl::SleepFor(absl::Milliseconds(20)); });
  at::empty({3}, at::TensorOptions().pinned_memory(true))
      .copy_(x, /*non_blocking=*/true);
  Wait(Current(1), side);
  Impl().synchronizeStream(side);
  EXPECT_THAT(Faults(), IsEmpty());
}

TEST_P(TestDeviceTest, ACopyBetweenDevicesIsOrderedOnBoth) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  const at::Tensor y = x.to(TestDevice(1));
  EXPECT_TRUE(HasBits(y + 1, at::full({3}, 2.f)));
  EXPECT_THAT(Faults(), IsEmpty());
  EXPECT_EQ(1, CountHostWaits());  // HasBits
}

using TestDeviceDeathTest = TestDeviceTest;
INSTANTIATE_TEST_SUITE_P(Modes, TestDeviceDeathTest,
                         ::testing::Values(Mode::kAtOnce));

TEST_P(TestDeviceDeathTest, TheHostCannotFollowADevicesPointer) {
  const at::Tensor x = at::ones({3}, TestDevice(0));
  EXPECT_DEATH(
      {
        volatile const float value = *x.const_data_ptr<float>();
        (void)value;
      },
      "");
}

// ---- memory

TEST_P(TestDeviceTest, CountsAndLimitsMemory) {
  auto* const allocator = c10::getDeviceAllocator(c10::DeviceType::PrivateUse1);
  allocator->resetPeakStats(1);
  const int64_t before =
      allocator->getDeviceStats(1).allocated_bytes[0].current;
  { const at::Tensor x = at::zeros({1024}, TestDevice(1)); }
  EXPECT_EQ(before, allocator->getDeviceStats(1).allocated_bytes[0].current);
  EXPECT_EQ(before + 4096,
            allocator->getDeviceStats(1).allocated_bytes[0].peak);
  const auto reserved = [&] {
    return allocator->getDeviceStats(1).reserved_bytes[0].current;
  };
  EXPECT_GT(reserved(), before);
  allocator->emptyCache();
  EXPECT_EQ(reserved(), before);
  SetMemoryLimit(1, before + 1000);
  EXPECT_THROW(at::zeros({1024}, TestDevice(1)), c10::OutOfMemoryError);
  SetMemoryLimit(1, INT64_MAX);
}

TEST_P(TestDeviceTest, NewMemoryIsPoisoned) {
  EXPECT_TRUE(at::empty({9}, TestDevice(0)).isnan().all().item<bool>());
}

using WorkersTest = TestDeviceTest;
INSTANTIATE_TEST_SUITE_P(Modes, WorkersTest, ::testing::Values(Mode::kWorkers));

// Without its wait a worker comes too late or too early, so the bits are wrong
// and not only the order. There are many tries, since one task in sixteen is
// delayed.
TEST_P(WorkersTest, ShowAMissingWaitInTheBits) {
  int wrong = 0;
  for (int i = 0; i < 200; ++i) {
    const c10::Stream side = FromPool(0);
    const at::Tensor x = at::ones({100}, TestDevice(0));
    const c10::StreamGuard guard(side);
    wrong += HasBits(x + 1, at::full({100}, 2.f)) ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
  EXPECT_THAT(Faults(), Not(IsEmpty()));
}

TEST_P(TestDeviceTest, AutogradOrdersItsStreams) {
  const c10::Stream side = FromPool(0);
  at::Tensor w = at::ones({8}, TestDevice(0)).requires_grad_(true);
  Wait(Current(0), side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = (w * w).sum();
  }
  Wait(side, Current(0));
  (y * 2).backward();
  EXPECT_TRUE(HasBits(w.grad(), at::full({8}, 4.f)));
  EXPECT_THAT(Faults(), IsEmpty());
}

}  // namespace
}  // namespace testdevice
