// The threads of a DataLoader: what they are, what they hold, how they end.
#include <atomic>
#include <thread>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/tensor.h"
#include "absl/synchronization/notification.h"
#include "base/monotonic.h"
#include "base/thread/no_threads_test_util.h"
#include "base/thread/wait_clock.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "loader/data_loader.h"
#include "loader/loader_test_util.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(WorkersTest, WorkersComputeAloneAndWithoutAutograd) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  const auto fetch = [](absl::Span<const int64_t>,
                        const BatchContext&) -> Tensors {
    return std::vector<at::Tensor>{
        at::tensor({static_cast<int64_t>(at::get_num_threads()),
                    static_cast<int64_t>(at::GradMode::is_enabled())})};
  };
  for (const int workers : {0, 2}) {
    auto loader = MakeLoader(OrderOf(8), fetch, LoaderOptions(1, workers));
    for (int i = 0; i < 4; ++i) {
      const at::Tensor seen = loader->Next()->tensors[0];
      EXPECT_EQ(seen[0].item<int64_t>(), workers == 0 ? 3 : 1);
      EXPECT_EQ(seen[1].item<int64_t>(), 0);
    }
    // Neither this thread nor new ones have been changed.
    EXPECT_EQ(at::get_num_threads(), 3);
    int of_new = 0;
    std::thread([&] { of_new = at::get_num_threads(); }).join();
    EXPECT_EQ(of_new, 3);
    EXPECT_TRUE(at::GradMode::is_enabled());
  }
  at::set_num_threads(before);
}

TEST(WorkersTest, EndsWithWorkersThatWaitForRoom) {
  Counter fetched;
  const auto fetch = [&](absl::Span<const int64_t> indices,
                         const BatchContext& context) {
    fetched.Add(1);
    return Indices(indices, context);
  };
  auto loader = MakeLoader(OrderOf(100), fetch, LoaderOptions(1, 3, 4));
  fetched.WaitFor(4);
  loader.reset();
  EXPECT_EQ(fetched.value(), 4);  // never more than the queue holds
}

TEST(WorkersTest, ACallThatTakesLongIsToldOfTheEnd) {
  absl::Notification begun;
  std::atomic<bool> once{false};
  auto loader = MakeLoader(
      OrderOf(100),
      [&](absl::Span<const int64_t>, const BatchContext& context) -> Tensors {
        if (!once.exchange(true)) begun.Notify();
        while (!context.cancelled()) std::this_thread::yield();
        return absl::CancelledError("told");
      },
      LoaderOptions(1, 2));
  begun.WaitForNotification();
  // Moving elsewhere drops what is being made, and cancels it.
  TESSERA_ASSERT_OK(loader->SetEpoch(1));
  loader.reset();
}

TEST(WorkersTest, WithoutThreadsItIsAnError) {
  const NoThreads none;
  EXPECT_THAT(
      DataLoader::Create(*DistributedOrder::Create(OrderOf(4)), Indices,
                         LoaderOptions(1, 2)),
      StatusIs(StatusCode::kResourceExhausted,
               AllOf(HasSubstr("loader: "), HasSubstr("tessera-loader"))));
}

// ---- The limit of bytes: batches are 8 bytes a sample.

TEST(WorkersTest, ALimitBelowOneBatchLetsOneIn) {
  Counter begun;
  const auto fetch = [&](absl::Span<const int64_t> indices,
                         const BatchContext& context) {
    begun.Add(1);
    return Indices(indices, context);
  };
  DataLoaderOptions options = LoaderOptions(10, 3, 50);
  options.prefetch_bytes = 8;
  auto loader = MakeLoader(OrderOf(64), fetch, options);
  for (int taken = 0; taken < 100; ++taken) {
    // One in the queue, and one that was begun when Next took that.
    EXPECT_LE(begun.value(), taken + 1);
    TESSERA_EXPECT_OK(loader->Next());
  }
}

TEST(WorkersTest, TheQueueHoldsWhatTheLimitAllows) {
  Counter begun;
  const auto fetch = [&](absl::Span<const int64_t> indices,
                         const BatchContext& context) {
    begun.Add(1);
    return Indices(indices, context);
  };
  DataLoaderOptions options = LoaderOptions(10, 3, 50);
  options.prefetch_bytes = 3 * 80 + 79;
  auto loader = MakeLoader(OrderOf(64), fetch, options);
  for (int taken = 0; taken < 100; ++taken) {
    begun.WaitFor(taken + 3);
    EXPECT_LE(begun.value(), taken + 3);
    TESSERA_EXPECT_OK(loader->Next());
  }
}

// ---- Figures.

TEST(WorkersTest, CountsWhatItDelivers) {
  for (const int workers : {0, 2}) {
    const int64_t before = DataWaitNanos();
    auto loader = MakeLoader(OrderOf(9), Indices, LoaderOptions(4, workers));
    for (int i = 0; i < 5; ++i) TESSERA_EXPECT_OK(loader->Next());
    const DataLoaderStats stats = loader->stats();
    EXPECT_EQ(stats.batches, 5);
    EXPECT_EQ(stats.samples, 20);
    EXPECT_EQ(stats.bytes, 160);
    EXPECT_EQ(stats.errors, 0);
    EXPECT_GT(stats.fetching, absl::ZeroDuration());
    EXPECT_EQ(DataWaitNanos() - before, absl::ToInt64Nanoseconds(stats.waited));
    if (workers == 0) EXPECT_EQ(stats.waited, stats.fetching);
  }
}

// A batch takes longer than the thread that asks for it needs to do so, sooner
// or later.
TEST(WorkersTest, WaitsAreCounted) {
  auto loader = MakeLoader(
      OrderOf(9),
      [&](absl::Span<const int64_t> indices, const BatchContext& context) {
        const absl::Duration end = MonotonicNow() + absl::Milliseconds(1);
        while (MonotonicNow() < end) std::this_thread::yield();
        return Indices(indices, context);
      },
      LoaderOptions(1, 1));
  for (int i = 0; i < 1000; ++i) {
    if (loader->stats().waited > absl::ZeroDuration()) break;
    TESSERA_EXPECT_OK(loader->Next());
  }
  EXPECT_GT(loader->stats().waited, absl::ZeroDuration());
}

// A batch that is ready costs no wait, and is counted.
TEST(WorkersTest, ReadyBatchesCostNoWait) {
  Counter fetched;
  const auto fetch = [&](absl::Span<const int64_t> indices,
                         const BatchContext& context) {
    fetched.Add(1);
    return Indices(indices, context);
  };
  auto loader = MakeLoader(OrderOf(9), fetch, LoaderOptions(1, 1, 4));
  // The fourth is fetched by the one worker, so the first three are ready.
  fetched.WaitFor(4);
  for (int i = 0; i < 3; ++i) TESSERA_EXPECT_OK(loader->Next());
  EXPECT_EQ(loader->stats().waited, absl::ZeroDuration());
  EXPECT_GE(loader->stats().ready, 1);
}

}  // namespace
}  // namespace tessera
