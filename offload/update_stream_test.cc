#include "offload/update_stream.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/update_stream_test_util.h"

namespace tessera {
namespace {

INSTANTIATE_TEST_SUITE_P(, UpdateStreamTest, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Uring" : "Threads";
                         });

TEST_P(UpdateStreamTest, GivesWhatALoopInMemoryGives) {
  for (const int buffers : {1, 2, 4}) {
    MakeStream(buffers);
    units_.clear();
    const auto f = at::kFloat, d = at::kDouble;
    AddUnit(0, {f});
    AddUnit(1, {f, d});
    AddUnit(100, {d, d, f});
    AddUnit(0, {d, d});
    AddUnit(5 * kSlice + 777, {f, f, f, f});
    AddUnit(kSlice, {d});
    AddUnit(kSlice - 1, {f, d});
    AddUnit(kSlice + 1, {d, d, d, d});
    AddUnit(3 * kSlice, {f, d, f});
    for (int round = 0; round < 4; ++round) {
      for (const auto& unit : units_) Push(unit.get(), round);
      TESSERA_EXPECT_OK(stream_->Drain());
      for (const auto& unit : units_) {
        unit->ChangeInMemory(round);
        unit->ExpectAllSlices();
        unit->ExpectAsInMemory();
      }
      std::rotate(units_.begin(), units_.begin() + 1, units_.end());
    }
  }
}

TEST_P(UpdateStreamTest, ReadsAllButZerosAndWritesAll) {
  MakeStream();
  const SwapStats before = file_->stats();
  TestUnit* const unit = AddUnit(3 * kSlice);
  const int64_t bytes = 2 * 3 * kSlice * 4;
  for (int round = 0; round < 3; ++round) {
    Push(unit, round);
    TESSERA_EXPECT_OK(stream_->Drain());
    EXPECT_FALSE(unit->states[0].room().zeros());
    const SwapStats now = file_->stats();
    EXPECT_EQ(now.bytes_written - before.bytes_written, bytes * (round + 1));
    EXPECT_EQ(now.bytes_read - before.bytes_read, bytes * round);
  }
}

// Slices of states in blocks begin with a block, and where a disk's blocks
// begin.
TEST_P(UpdateStreamTest, GoesThroughBlocks) {
  constexpr int64_t kLong = 65536, kNumel = 3 * kLong + 128;
  file_ = Open();
  UpdateStreamOptions options;
  options.buffers = 2;
  options.slice_numel = kLong;
  TESSERA_ASSERT_OK_AND_ASSIGN(stream_, UpdateStream::Create(file_, options));
  const auto allocate = [&](ElementFormat format) {
    return TieredBuffer::Allocate(kNumel, format, at::kCPU,
                                  MemoryKind::kOptimizer, {Tier::kDisk, file_},
                                  "state");
  };
  TESSERA_ASSERT_OK_AND_ASSIGN(TieredBuffer blocks,
                               allocate(ElementFormat::Blocks(64, 68)));
  TESSERA_ASSERT_OK_AND_ASSIGN(TieredBuffer wide, allocate(at::kFloat));
  // The first byte of each block holds its number, and so does each element of
  // the other state.
  for (int round = 1; round <= 2; ++round) {
    StreamedUpdate update;
    update.numel = kNumel;
    update.states = {{&blocks}, {&wide}};
    update.compute = [&](Range slice, const std::vector<char*>& data) {
      for (int64_t i = 0; i < slice.numel(); ++i) {
        reinterpret_cast<float*>(data[1])[i] +=
            static_cast<float>(slice.begin + i);
        data[0][i / 64 * 68] += i % 64 == 0 ? (slice.begin + i) / 64 % 100 : 0;
      }
      return absl::OkStatus();
    };
    TESSERA_ASSERT_OK(stream_->Push(std::move(update)).computed.Wait());
    TESSERA_ASSERT_OK(stream_->Drain());
  }
  std::vector<char> bytes(static_cast<size_t>(blocks.bytes()));
  TESSERA_ASSERT_OK(blocks.ReadBytes(0, blocks.bytes(), bytes.data()));
  std::vector<float> numbers(kNumel);
  TESSERA_ASSERT_OK(
      wide.ReadBytes(0, wide.bytes(), reinterpret_cast<char*>(numbers.data())));
  for (int64_t i = 0; i < kNumel; ++i) {
    const auto at = static_cast<size_t>(i);
    ASSERT_EQ(numbers[at], 2 * static_cast<float>(i));
    ASSERT_EQ(bytes[at / 64 * 68], static_cast<char>(2 * (i / 64 % 100))) << i;
  }
}

// The rest of the cores feeds a device.
TEST_P(UpdateStreamTest, ComputesWithAPartOfTheThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  for (const auto& [part, expected] :
       {std::pair(1.0, 4), std::pair(0.8, 3), std::pair(0.0, 1)}) {
    UpdateStreamOptions options;
    options.most_states = 0;
    options.threads = part;
    TESSERA_ASSERT_OK_AND_ASSIGN(
        stream_, UpdateStream::Create(/*disk=*/nullptr, options));
    int threads = 0;
    StreamedUpdate update;
    update.numel = 1;
    update.compute = [&](Range, const std::vector<char*>&) {
      threads = at::get_num_threads();
      return absl::OkStatus();
    };
    stream_->Push(std::move(update));
    TESSERA_EXPECT_OK(stream_->Drain());
    EXPECT_EQ(threads, expected) << part;
    EXPECT_EQ(at::get_num_threads(), 4);
    int of_another = 0;
    std::thread([&] { of_another = at::get_num_threads(); }).join();
    EXPECT_EQ(of_another, 4);
  }
  stream_ = nullptr;
  at::set_num_threads(before);
}

TEST_P(UpdateStreamTest, AFutureEndsAfterTheLastSliceAndBeforeItIsWritten) {
  absl::Notification may_be_written;
  system_.answer = [&](bool write, int64_t, int64_t result) {
    if (write) may_be_written.WaitForNotification();
    return result;
  };
  MakeStream();
  TestUnit* const unit = AddUnit(4 * kSlice);  // as many as there are buffers
  TESSERA_EXPECT_OK(Push(unit).Wait());
  unit->ExpectAllSlices();
  unit->ChangeInMemory(0);
  EXPECT_FALSE(written_.Done());
  may_be_written.Notify();
  TESSERA_EXPECT_OK(written_.Wait());
  unit->ExpectAsInMemory();
}

TEST_P(UpdateStreamTest, WhatIsWrittenWholeIsNotRead) {
  MakeStream();
  TestUnit* const unit = AddUnit(2 * kSlice);
  TESSERA_EXPECT_OK(Push(unit).Wait());
  TESSERA_EXPECT_OK(stream_->Drain());
  const int64_t before = file_->stats().bytes_read;
  num_read_ = 1;
  TESSERA_EXPECT_OK(Push(unit).Wait());
  EXPECT_EQ(file_->stats().bytes_read - before, unit->states[0].bytes());
}

TEST_P(UpdateStreamTest, AFutureWaitsForNoLaterUnit) {
  MakeStream();
  absl::Notification go;
  TestUnit* const one = AddUnit(2 * kSlice);
  TestUnit* const two = AddUnit(kSlice);
  const CommFuture first = Push(one);
  const CommFuture second = Push(two, 0, [&](Range) {
    go.WaitForNotification();
    return absl::OkStatus();
  });
  TESSERA_EXPECT_OK(first.Wait());
  one->ExpectAllSlices();
  go.Notify();
  TESSERA_EXPECT_OK(second.Wait());
  two->ExpectAllSlices();
}

TEST_P(UpdateStreamTest, ComputeIsDestroyedBeforeItsFutureEnds) {
  MakeStream();
  for (const bool fails : {false, true}) {
    for (const int64_t numel : {int64_t{0}, 2 * kSlice}) {
      auto held = std::make_shared<int>(1);
      const std::weak_ptr<int> seen = held;
      const CommFuture future =
          Push(AddUnit(numel), 0, [fails, held = std::move(held)](Range) {
            return fails ? absl::DataLossError("refused") : absl::OkStatus();
          });
      (void)future.Wait();
      EXPECT_TRUE(seen.expired()) << fails << " " << numel;
    }
  }
}

TEST_P(UpdateStreamTest, UnitsArePushedWhileOthersAreChanged) {
  MakeStream(2);
  absl::Notification began, go;
  Push(AddUnit(3 * kSlice), 0, [&](Range slice) {
    if (slice.begin == 0) began.Notify();
    go.WaitForNotification();
    return absl::OkStatus();
  });
  began.WaitForNotification();
  for (int i = 0; i < 8; ++i) AddUnit(i * 1000);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 1 + t; i <= 8; i += 2) {
        // Push() notes what it was given last, for one thread.
        const CommFuture future =
            stream_->Push(UpdateOf(units_[i].get(), 0, nullptr)).computed;
        if (i == 1 + t) go.WaitForNotification();
        TESSERA_EXPECT_OK(future.Wait());
      }
      TESSERA_EXPECT_OK(stream_->Drain());
    });
  }
  go.Notify();
  for (std::thread& thread : threads) thread.join();
  for (const auto& unit : units_) {
    unit->ExpectAllSlices();
    unit->ChangeInMemory(0);
    unit->ExpectAsInMemory();
  }
}

// Often, since the thread may have begun with it or not.
TEST_P(UpdateStreamTest, TheEndWaitsForWhatWasPushed) {
  for (int i = 0; i < 20; ++i) {
    units_.clear();
    MakeStream();
    const CommFuture future = Push(AddUnit(i % 3 * kSlice));
    Push(AddUnit(kSlice + 9));
    stream_.reset();
    for (const auto& unit : units_) {
      unit->ExpectAllSlices();
      unit->ChangeInMemory(0);
      unit->ExpectAsInMemory();
    }
    ASSERT_FALSE(HasFailure());  // or the future may never end
    TESSERA_EXPECT_OK(future.Wait());
  }
}

TEST_P(UpdateStreamTest, MemoryIsThatOfItsBuffers) {
  MakeStream(3);
  TESSERA_EXPECT_OK(stream_->Drain());  // of nothing
  EXPECT_EQ(stream_->disk(), file_);
  EXPECT_EQ(stream_->resident_bytes(), 3 * (4 * kSlice * 8 + kSwapAlignment));
  EXPECT_EQ(stream_->stats().computing, absl::ZeroDuration());
  Push(AddUnit(3 * kSlice));
  TESSERA_EXPECT_OK(stream_->Drain());
  EXPECT_GT(stream_->stats().computing, absl::ZeroDuration());
}

}  // namespace
}  // namespace tessera
