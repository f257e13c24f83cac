// New values that are wanted before the disk has them.
#include <cstring>
#include <memory>
#include <thread>
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

constexpr int64_t kNumel = 9 * kSlice + 77;

class FetchTest : public UpdateStreamTest {
 protected:
  // Before slice number `slice` is computed, until `go_`.
  Before StopsAt(int64_t slice) {
    return [this, slice](Range at) {
      if (at.begin != slice * kSlice) return absl::OkStatus();
      stopped_.Notify();
      go_.WaitForNotification();
      return absl::OkStatus();
    };
  }
  // Values of a state on their way to memory that is aligned to nothing.
  struct Wanted {
    std::shared_ptr<const UpdateStream::Fetch> fetch;
    std::vector<char> memory;
  };
  std::unique_ptr<Wanted> Fetch(const TieredBuffer& state) {
    auto wanted = std::make_unique<Wanted>();
    wanted->memory.resize(static_cast<size_t>(state.bytes()) + 1);
    wanted->fetch = stream_->StartFetch(state, wanted->memory.data() + 1);
    return wanted;
  }
  static void ExpectIs(const Wanted& wanted, const std::vector<char>& values) {
    ASSERT_NE(wanted.fetch, nullptr);
    TESSERA_EXPECT_OK(wanted.fetch->Wait());
    EXPECT_EQ(
        std::memcmp(wanted.memory.data() + 1, values.data(), values.size()), 0);
  }

  absl::Notification stopped_, go_;
};

INSTANTIATE_TEST_SUITE_P(, FetchTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "Uring" : "Threads";
});

// With a unit of ten slices and four in memory, the first slices have left
// memory by then, some are there, and others are still to come; or all of them
// are.
TEST_P(FetchTest, TakesWhatTheUpdateMakes) {
  MakeStream(4);
  TestUnit* const unit = AddUnit(kNumel, {at::kFloat, at::kDouble});
  Push(unit, 0, StopsAt(7));
  stopped_.WaitForNotification();
  TestUnit* const behind = AddUnit(kNumel);
  Push(behind, 1);
  unit->ChangeInMemory(0);
  behind->ChangeInMemory(1);
  const auto first = Fetch(unit->states[1]);
  const auto second = Fetch(unit->states[0]);
  const auto again = Fetch(unit->states[1]);
  const auto later = Fetch(behind->states[1]);
  go_.Notify();
  ExpectIs(*first, unit->want[1]);
  ExpectIs(*second, unit->want[0]);
  ExpectIs(*again, unit->want[1]);
  ExpectIs(*later, behind->want[1]);
  TESSERA_EXPECT_OK(stream_->Drain());
  unit->ExpectAsInMemory();
}

// Two of its four buffers hold another unit's by then.
TEST_P(FetchTest, TakesNothingOfAnother) {
  MakeStream(4);
  TestUnit* const unit = AddUnit(kNumel);
  TestUnit* const behind = AddUnit(kNumel);
  absl::Notification pushed;
  const Before stops = StopsAt(9);
  Push(unit, 0, [&](Range at) {
    if (at.begin == 8 * kSlice) {
      pushed.WaitForNotification();
      while (file_->stats().bytes_written < 8 * kSlice * 4 * 2) {
        std::this_thread::yield();  // its buffers are read to behind this
      }
    }
    return stops(at);
  });
  Push(behind, 1);
  pushed.Notify();
  stopped_.WaitForNotification();
  unit->ChangeInMemory(0);
  const auto wanted = Fetch(unit->states[0]);
  go_.Notify();
  ExpectIs(*wanted, unit->want[0]);
  TESSERA_EXPECT_OK(stream_->Drain());
}

// It has been computed, and is not written yet.
TEST_P(FetchTest, DoesNotWaitForTheDisk) {
  MakeStream(4);
  TestUnit* const unit = AddUnit(2 * kSlice);
  unit->ChangeInMemory(0);
  absl::Notification written;
  system_.answer = [&](bool write, int64_t, int64_t result) {
    if (write) written.WaitForNotification();
    return result;
  };
  TESSERA_EXPECT_OK(Push(unit, 0).Wait());
  const auto wanted = Fetch(unit->states[0]);
  ExpectIs(*wanted, unit->want[0]);
  EXPECT_FALSE(written_.Done());
  written.Notify();
  TESSERA_EXPECT_OK(stream_->Drain());
}

TEST_P(FetchTest, IsNoneOfWhatIsNotChanging) {
  MakeStream(4);
  TestUnit* const unit = AddUnit(kSlice);
  EXPECT_EQ(Fetch(unit->states[0])->fetch, nullptr);
  Push(unit);
  TESSERA_ASSERT_OK(stream_->Drain());
  EXPECT_EQ(Fetch(unit->states[0])->fetch, nullptr);
}

// What is early is nobody's until it is kept.
TEST_P(FetchTest, OfOneThatIsKept) {
  MakeStream(4);
  TestUnit* const unit = AddUnit(kNumel);
  const UpdateStream::Early early = PushEarly(unit, 0, StopsAt(7));
  stopped_.WaitForNotification();
  EXPECT_EQ(Fetch(unit->states[0])->fetch, nullptr);
  ASSERT_TRUE(stream_->Keep(early, nullptr).has_value());
  unit->ChangeInMemory(0);
  const auto wanted = Fetch(unit->states[0]);
  go_.Notify();
  ExpectIs(*wanted, unit->want[0]);
  TESSERA_EXPECT_OK(stream_->Drain());
}

// A fetch returns the error of a slice that cannot be written, before and after
// it is known.
TEST_P(FetchTest, HasTheErrorOfItsUpdate) {
  MakeStream(2);
  TestUnit* const unit = AddUnit(kNumel);
  Fail(/*writes=*/true, unit->states[1], 3 * kSlice * 4);
  Push(unit, 0, StopsAt(1));
  stopped_.WaitForNotification();
  const auto before = Fetch(unit->states[0]);
  go_.Notify();
  const auto error = StatusIs(absl::StatusCode::kUnavailable,
                              HasSubstr("of state 1 of unit 0 "));
  EXPECT_THAT(before->fetch->Wait(), error);
  ExpectStaysFailed(error);
}

}  // namespace
}  // namespace tessera
