// Updates that begin before it is known that they are the right ones.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/update_stream.h"
#include "offload/update_stream_test_util.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Several times, so that what was the next is what is, and the next again;
// first from zeros.
TEST_P(UpdateStreamTest, OneThatIsKeptIsAsIfPushedThen) {
  MakeStream();
  TestUnit* const unit = AddUnit(5 * kSlice + 77);
  for (int round = 0; round < 5; ++round) {
    const UpdateStream::Early early = PushEarly(unit, round);
    AwaitComputed();
    unit->ExpectAllSlices();
    unit->ExpectAsInMemory();  // as before
    const auto kept = stream_->Keep(early, nullptr);
    ASSERT_TRUE(kept.has_value());
    TESSERA_EXPECT_OK(kept->computed.Wait());
    TESSERA_EXPECT_OK(kept->written.Wait());
    unit->ChangeInMemory(round);
    unit->ExpectAsInMemory();
    if (round % 2 == 0) continue;
    Push(unit, round);  // between them one that is not early
    TESSERA_EXPECT_OK(stream_->Drain());
    unit->ExpectAllSlices();
    unit->ChangeInMemory(round);
    unit->ExpectAsInMemory();
  }
}

TEST_P(UpdateStreamTest, OneIsKeptWhileItGoesOn) {
  MakeStream(2);
  absl::Notification began, go;
  TestUnit* const unit = AddUnit(6 * kSlice);
  const UpdateStream::Early early = PushEarly(unit, 0, [&](Range slice) {
    if (slice.begin == kSlice) began.Notify();
    if (slice.begin >= kSlice) go.WaitForNotification();
    return absl::OkStatus();
  });
  began.WaitForNotification();
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = held;
  const auto kept = stream_->Keep(early, std::move(held));
  ASSERT_TRUE(kept.has_value());
  EXPECT_FALSE(kept->computed.Done());
  EXPECT_FALSE(seen.expired());
  go.Notify();
  TESSERA_EXPECT_OK(kept->computed.Wait());
  EXPECT_TRUE(seen.expired());
  TESSERA_EXPECT_OK(stream_->DrainKept());
  unit->ExpectAllSlices();
  unit->ChangeInMemory(0);
  unit->ExpectAsInMemory();
}

TEST_P(UpdateStreamTest, OneThatIsDroppedLeavesNoTrace) {
  MakeStream();
  TestUnit* const unit = AddUnit(3 * kSlice);
  for (int round = 0; round < 3; ++round) {
    UpdateStream::Early early = PushEarly(unit, round + 50);
    if (round > 0) AwaitComputed();
    stream_->Drop(early);
    TESSERA_EXPECT_OK(stream_->DrainKept());
    unit->ExpectAsInMemory();
    early = PushEarly(unit, round);
    AwaitComputed();
    ASSERT_TRUE(stream_->Keep(early, nullptr).has_value());
    TESSERA_EXPECT_OK(stream_->DrainKept());
    unit->ChangeInMemory(round);
    unit->ExpectAsInMemory();
  }
}

TEST_P(UpdateStreamTest, DrainDropsThem) {
  MakeStream();
  TestUnit* const unit = AddUnit(3 * kSlice);
  const UpdateStream::Early early = PushEarly(unit);
  AwaitComputed();
  TESSERA_EXPECT_OK(stream_->Drain());
  EXPECT_FALSE(stream_->Keep(early, nullptr).has_value());
  EXPECT_TRUE(unit->states[0].zeros());
  unit->ExpectAsInMemory();
}

TEST_P(UpdateStreamTest, WhatHasNotBegunIsKeptInItsPlace) {
  MakeStream();
  absl::Notification go;
  Push(AddUnit(kSlice), 0, [&](Range) {
    go.WaitForNotification();
    return absl::OkStatus();
  });
  Push(AddUnit(8 * kSlice));  // more than is read ahead
  TestUnit* const unit = AddUnit(3 * kSlice);
  const UpdateStream::Early early = PushEarly(unit);
  const auto kept = stream_->Keep(early, nullptr);
  ASSERT_TRUE(kept.has_value());
  stream_->DropQueued();  // it is none of these any more
  const CommFuture after = Push(AddUnit(kSlice));
  EXPECT_FALSE(kept->computed.Done());
  go.Notify();
  TESSERA_EXPECT_OK(after.Wait());
  EXPECT_TRUE(kept->computed.Done());
  TESSERA_EXPECT_OK(stream_->DrainKept());
  unit->ExpectAllSlices();
  unit->ChangeInMemory(0);
  unit->ExpectAsInMemory();
}

TEST_P(UpdateStreamTest, WhatWasTakenBackNeverBegins) {
  for (const bool all : {false, true}) {
    SCOPED_TRACE(all);
    MakeStream();
    absl::Notification go;
    Push(AddUnit(kSlice), 0, [&](Range) {
      go.WaitForNotification();
      return absl::OkStatus();
    });
    TestUnit* const ahead = AddUnit(8 * kSlice);  // more than is read ahead
    Push(ahead);
    TestUnit* const unit = AddUnit(kSlice);
    const UpdateStream::Early early = PushEarly(unit);
    all ? stream_->DropQueued() : stream_->Drop(early);
    go.Notify();
    TESSERA_EXPECT_OK(stream_->Drain());
    ahead->ExpectAllSlices();
    EXPECT_THAT(unit->slices, IsEmpty());
    unit->ExpectAsInMemory();
    EXPECT_FALSE(stream_->Keep(early, nullptr).has_value());
  }
}

TEST_P(UpdateStreamTest, DrainKeptDoesNotWaitForThem) {
  MakeStream();
  absl::Notification began, go;
  Push(AddUnit(kSlice));
  TESSERA_EXPECT_OK(written_.Wait());
  TestUnit* const unit = AddUnit(kSlice);
  PushEarly(unit, 0, [&](Range) {
    began.Notify();
    go.WaitForNotification();
    return absl::OkStatus();
  });
  began.WaitForNotification();
  TESSERA_EXPECT_OK(stream_->DrainKept());
  go.Notify();
  TESSERA_EXPECT_OK(stream_->Drain());
  unit->ExpectAllSlices();
  unit->ExpectAsInMemory();
}

// What it would have changed is whole, so it is made again by whoever asks.
TEST_P(UpdateStreamTest, AnErrorOfOneIsItsOwn) {
  MakeStream(1);  // so what comes waits until what was is written
  TestUnit* const unit = AddUnit(3 * kSlice);
  Push(unit);
  TESSERA_ASSERT_OK(stream_->Drain());
  unit->ChangeInMemory(0);
  for (const bool writes : {false, true}) {
    const UpdateStream::Early warm_up = PushEarly(unit, 7);  // has its room
    stream_->Drop(warm_up);
    TESSERA_ASSERT_OK(stream_->DrainKept());
    unit->slices.clear();
    const int64_t first = (writes ? unit->states[1].next()->begin
                                  : unit->states[1].extent().begin) +
                          kSlice * 4;
    system_.answer = [=](bool write, int64_t offset, int64_t result) {
      return write == writes && offset == first ? -EIO : result;
    };
    const UpdateStream::Early early = PushEarly(unit, 1);
    TestUnit* const after = AddUnit(kSlice);
    TESSERA_EXPECT_OK(Push(after).Wait());
    TESSERA_EXPECT_OK(written_.Wait());
    after->ExpectAllSlices();
    EXPECT_FALSE(stream_->Keep(early, nullptr).has_value());
    system_.answer = nullptr;
    unit->ExpectAsInMemory();
    unit->slices.clear();
    TESSERA_EXPECT_OK(Push(unit, 2).Wait());
    TESSERA_EXPECT_OK(stream_->Drain());
    unit->ChangeInMemory(2);
    unit->ExpectAsInMemory();
  }
}

// What changes nothing on the disk has written beside what is in memory, and
// what is pushed behind it looks whether it has.
TEST_P(UpdateStreamTest, AnErrorOfOneInMemoryIsItsOwnWhenItIsKept) {
  MakeStream();
  absl::Notification go;
  Push(AddUnit(kSlice), 0, [&](Range) {
    go.WaitForNotification();
    return absl::OkStatus();
  });
  StreamedUpdate update;
  update.numel = kSlice;
  update.compute = [](Range, const std::vector<char*>&) {
    return absl::ResourceExhaustedError("no memory");
  };
  const auto kept =
      stream_->Keep(stream_->PushEarly(std::move(update)), nullptr);
  ASSERT_TRUE(kept.has_value());
  const CommFuture after = Push(AddUnit(kSlice));
  go.Notify();
  EXPECT_THAT(kept->computed.Wait(),
              StatusIs(absl::StatusCode::kResourceExhausted));
  TESSERA_EXPECT_OK(after.Wait());
  TESSERA_EXPECT_OK(stream_->Drain());
}

// Once it is kept it is all there is.
TEST_P(UpdateStreamTest, AnErrorOfOneThatIsKeptIsThatOfAllThatComesAfter) {
  MakeStream(2);
  TestUnit* const unit = AddUnit(6 * kSlice);
  TESSERA_ASSERT_OK(unit->states[1].MakeRoomForNext());
  const int64_t fails = unit->states[1].next()->begin + 3 * kSlice * 4;
  system_.answer = [=](bool write, int64_t offset, int64_t result) {
    return write && offset == fails ? -EIO : result;
  };
  absl::Notification began, go;
  const UpdateStream::Early early = PushEarly(unit, 1, [&](Range slice) {
    if (slice.begin == kSlice) {
      began.Notify();
      go.WaitForNotification();
    }
    return absl::OkStatus();
  });
  began.WaitForNotification();
  EXPECT_TRUE(stream_->Keep(early, nullptr).has_value());
  go.Notify();
  ExpectStaysFailed(StatusIs(absl::StatusCode::kUnavailable,
                             HasSubstr("of state 1 of unit 0 ")));
}

}  // namespace
}  // namespace tessera
