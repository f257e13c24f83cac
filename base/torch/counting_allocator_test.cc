// One test for what needs a process in which nothing is counted yet.
#include "base/torch/counting_allocator.h"

#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/step_memory/step_memory.h"
#include "base/torch/tensor_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int64_t Counted() { return StepMemory::Global().tensor_bytes(); }

TEST(CountingAllocatorTest, MemoryOfBeforeIsNotCounted) {
  at::Tensor before = torch::empty({1 << 20});
  CountTensorMemory();
  EXPECT_EQ(Counted(), 0);
  at::Tensor after = torch::empty({1 << 20});
  EXPECT_GE(Counted(), 4 << 20);
  EXPECT_LE(Counted(), (4 << 20) + (8 << 10));
  before.reset();
  EXPECT_GE(Counted(), 4 << 20);
  after.reset();
  EXPECT_EQ(Counted(), 0);
}

TEST(CountingAllocatorTest, RawMemoryAndEmptyTensors) {
  CountTensorMemory();
  const int64_t begin = Counted();
  void* const raw = at::getCPUAllocator()->raw_allocate(1 << 16);
  EXPECT_GE(Counted(), begin + (1 << 16));
  at::getCPUAllocator()->raw_deallocate(raw);
  EXPECT_EQ(Counted(), begin);
  at::Tensor empty = torch::empty({0});
  EXPECT_EQ(Counted(), begin);
  at::Tensor small = torch::empty({1});
  small.resize_({1000});
  EXPECT_GE(Counted(), begin + 4000);
  small = at::Tensor();
  EXPECT_EQ(Counted(), begin);
}

// Each thread frees what another has made, while the slot changes.
TEST(CountingAllocatorTest, AnyThreadMayFree) {
  CountTensorMemory();
  const StepMemory::Training training;
  const int units[] = {StepMemory::Global().UnitNumber("a"),
                       StepMemory::Global().UnitNumber("b")};
  const int64_t begin = Counted();
  constexpr int kThreads = 4, kRounds = 2000;
  std::vector<std::vector<at::Tensor>> tensors(kThreads);
  for (auto& made : tensors) made.resize(kRounds);
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kRounds; ++i) {
        NoteUnitUse(units[i % 2]);
        tensors[t][i] = torch::empty({static_cast<int64_t>(i % 300)});
        at::Tensor gone = torch::empty({5000});
      }
      ++made;
      while (made < kThreads) std::this_thread::yield();
      tensors[(t + 1) % kThreads].clear();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(Counted(), begin);
  EXPECT_EQ(StepMemory::Global().Now().held[HeldKind::kActivations], 0);
}

// Address sanitizer ends the process instead of refusing.
#if !__has_feature(address_sanitizer)
TEST(CountingAllocatorTest, ARefusalInAForwardSaysWhatIsHeld) {
  CountTensorMemory();
  const StepMemory::Training training;
  NoteUnitUse(StepMemory::Global().UnitNumber("block3"));
  at::Tensor held = torch::empty({3 << 18});
  std::string message;
  try {
    torch::empty({int64_t{1} << 55});
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  EXPECT_THAT(message, AllOf(HasSubstr("can't allocate memory"),
                             HasSubstr("in forward, unit block3"),
                             HasSubstr("activations")));
  EXPECT_GE(StepMemory::Global().refusals(), 1);
}
#endif

}  // namespace
}  // namespace tessera
