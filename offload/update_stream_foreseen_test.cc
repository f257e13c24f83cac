// What is read before it is pushed.
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/update_stream.h"
#include "offload/update_stream_test_util.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kBuffers = 4;
// Requests of a slice of one state.
constexpr int kRequests = kSlice * 4 / kBlock;

class ForeseenTest : public UpdateStreamTest {
 protected:
  // That somebody has written before.
  TestUnit* AddWritten(int64_t numel) {
    TestUnit* const unit = AddUnit(numel);
    Push(unit, 0);
    TESSERA_EXPECT_OK(written_.Wait());
    unit->ExpectAllSlices();
    unit->ChangeInMemory(0);
    return unit;
  }
  void CountReads() {
    absl::MutexLock lock(&mutex_);
    reads_ = 0;
    system_.answer = [this](bool write, int64_t offset, int64_t result) {
      absl::MutexLock lock(&mutex_);
      if (!write) ++reads_;
      return !write && offset == fails_at_ ? -EIO : result;
    };
  }
  int reads() {
    absl::MutexLock lock(&mutex_);
    return reads_;
  }
  bool AwaitReads(int count) {
    const auto all = [this, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return reads_ >= count;
    };
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(30));
  }
  // All that there is memory for is being read.
  void Foresee(TestUnit* unit, size_t states = 2) {
    CountReads();
    stream_->Prefetch({StatesOf(unit, states)});
    EXPECT_TRUE(AwaitReads(kBuffers * static_cast<int>(states) * kRequests));
  }
  static std::vector<TieredBuffer*> StatesOf(TestUnit* unit,
                                             size_t states = 2) {
    std::vector<TieredBuffer*> of;
    for (size_t i = 0; i < states; ++i) of.push_back(&unit->states[i]);
    return of;
  }
  // Returns the last request of the second slice. A read ends with its first
  // error.
  static int64_t LastRequest(const TieredBuffer& state) {
    return state.extent().begin + 2 * kSlice * 4 - kBlock;
  }
  void PushAndCompare(TestUnit* unit, int round) {
    TESSERA_EXPECT_OK(Push(unit, round).Wait());
    TESSERA_EXPECT_OK(written_.Wait());
    unit->ExpectAllSlices();
    unit->ChangeInMemory(round);
    unit->ExpectAsInMemory();
  }

  int64_t fails_at_ = -1;  // of the file

 private:
  absl::Mutex mutex_;
  int reads_ = 0;
};

INSTANTIATE_TEST_SUITE_P(, ForeseenTest, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Uring" : "Threads";
                         });

TEST_P(ForeseenTest, ItIsReadOnce) {
  for (const bool early : {false, true}) {
    for (const size_t states : {2, 1}) {
      MakeStream(kBuffers);
      TestUnit* const unit = AddWritten(6 * kSlice + 77);
      Foresee(unit, states);
      EXPECT_THAT(unit->slices, IsEmpty());
      if (early) {
        const UpdateStream::Early update = PushEarly(unit, 1);
        AwaitComputed();
        ASSERT_TRUE(stream_->Keep(update, nullptr).has_value());
      } else {
        Push(unit, 1);
      }
      TESSERA_EXPECT_OK(stream_->DrainKept());
      EXPECT_EQ(reads(), 2 * (6 * kRequests + 1));
      unit->ExpectAllSlices();
      unit->ChangeInMemory(1);
      unit->ExpectAsInMemory();
      PushAndCompare(unit, 2);  // and not what is in memory of before
    }
  }
}

// One after the other, as far as there is memory, and on when some is free.
TEST_P(ForeseenTest, SeveralAreReadInTheirOrder) {
  MakeStream(kBuffers);
  std::vector<TestUnit*> units;
  std::vector<std::vector<TieredBuffer*>> states;
  for (const int64_t numel :
       {int64_t{9}, 2 * kSlice + 1, int64_t{0}, 6 * kSlice, 2 * kSlice}) {
    units.push_back(AddWritten(numel));
    states.push_back(StatesOf(units.back()));
  }
  for (const size_t come : {size_t{5}, size_t{3}, size_t{1}, size_t{0}}) {
    CountReads();
    stream_->Prefetch(states);
    ASSERT_TRUE(AwaitReads(2 * (1 + 2 * kRequests + 1)));
    for (size_t i = 0; i < come; ++i) Push(units[i], 1);
    TESSERA_EXPECT_OK(stream_->DrainKept());
    if (come == 5) EXPECT_EQ(reads(), 2 * (1 + 10 * kRequests + 1));
    for (size_t i = 0; i < come; ++i) {
      units[i]->ExpectAllSlices();
      units[i]->ChangeInMemory(1);
    }
    for (size_t i = units.size(); i-- > come;) PushAndCompare(units[i], 2);
    for (size_t i = 0; i < come; ++i) units[i]->ExpectAsInMemory();
  }
}

// Pushed before it was foreseen: it may be written when that begins.
TEST_P(ForeseenTest, WhatWasPushedBeforeIsWrittenFirst) {
  MakeStream(kBuffers);
  TestUnit* const unit = AddWritten(5 * kSlice);
  TestUnit* const other = AddWritten(5 * kSlice);
  absl::Notification go;
  CountReads();
  Push(unit, 1, [&](Range) {
    go.WaitForNotification();
    return absl::OkStatus();
  });
  Push(other, 1);
  stream_->Prefetch({StatesOf(unit), StatesOf(other)});
  go.Notify();
  EXPECT_TRUE(AwaitReads(2 * kRequests * (10 + kBuffers)));
  for (TestUnit* const each : {unit, other}) {
    each->ExpectAllSlices();
    each->ChangeInMemory(1);
  }
  PushAndCompare(unit, 2);
  PushAndCompare(other, 2);
}

TEST_P(ForeseenTest, AnotherMayComeFirst) {
  MakeStream(kBuffers);
  TestUnit* const unit = AddWritten(5 * kSlice);
  for (const int64_t numel : {int64_t{0}, kSlice, 5 * kSlice}) {
    TestUnit* const other = AddWritten(numel);
    Foresee(unit);
    PushAndCompare(other, 1);
    PushAndCompare(unit, 2);
  }
}

// It is not that which was foreseen, though its first state is.
TEST_P(ForeseenTest, MoreMayHaveBeenForeseen) {
  MakeStream(kBuffers);
  TestUnit* const unit = AddWritten(5 * kSlice);
  Foresee(unit);
  StreamedUpdate update = UpdateOf(unit, 1, nullptr);
  std::swap(update.states[0], update.states[1]);
  update.compute = [](Range slice, const std::vector<char*>& data) {
    for (size_t i = 0; i < 2; ++i) {
      Change(at::kFloat, slice, i, 1, data[1 - i]);
    }
    return absl::OkStatus();
  };
  TESSERA_EXPECT_OK(stream_->Push(std::move(update)).written.Wait());
  unit->ChangeInMemory(1);
  unit->ExpectAsInMemory();
}

TEST_P(ForeseenTest, DrainForgetsIt) {
  MakeStream(kBuffers);
  TestUnit* const unit = AddWritten(5 * kSlice);
  Foresee(unit);
  TESSERA_EXPECT_OK(stream_->Drain());
  TESSERA_ASSERT_OK(stream_->Reserve(5));  // whose memory is another
  std::vector<char>& now = unit->want[1];
  Change(at::kFloat, {0, unit->numel}, 1, 7, now.data());
  TESSERA_EXPECT_OK(unit->states[1].WriteBytes(
      0, static_cast<int64_t>(now.size()), now.data()));
  PushAndCompare(unit, 1);
}

TEST_P(ForeseenTest, AStreamEndsThatHasForeseen) {
  MakeStream(kBuffers);
  Foresee(AddWritten(5 * kSlice));
  stream_ = nullptr;
}

TEST_P(ForeseenTest, AnErrorIsThatOfThePushOrNobodys) {
  MakeStream(kBuffers);
  TestUnit* const unit = AddWritten(5 * kSlice);
  TestUnit* const other = AddWritten(kSlice);
  fails_at_ = LastRequest(unit->states[1]);
  Foresee(unit);
  PushAndCompare(other, 1);
  fails_at_ = -1;
  PushAndCompare(unit, 1);
  fails_at_ = LastRequest(unit->states[1]);
  Foresee(unit);
  fails_at_ = -1;
  const auto error = StatusIs(absl::StatusCode::kUnavailable,
                              HasSubstr("of state 1 of unit 0 "));
  EXPECT_THAT(Push(unit, 2).Wait(), error);
  EXPECT_THAT(unit->slices, ::testing::SizeIs(1));
  ExpectStaysFailed(error);
}

}  // namespace
}  // namespace tessera
