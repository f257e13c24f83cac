// What UpdateStream says of updates and disks that fail.
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/thread/no_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/update_stream.h"
#include "offload/update_stream_test_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_P(UpdateStreamTest, AnErrorOfComputeIsThatOfAllThatComesAfter) {
  for (const bool thrown : {false, true}) {
    MakeStream();
    TestUnit* const before = AddUnit(2 * kSlice);
    TestUnit* const fails = AddUnit(6 * kSlice);
    TestUnit* const after = AddUnit(kSlice);
    const CommFuture futures[] = {Push(before),
                                  Push(fails, 0,
                                       [=](Range slice) -> absl::Status {
                                         if (slice.begin < kSlice)
                                           return absl::OkStatus();
                                         if (thrown)
                                           throw std::runtime_error("refused");
                                         return absl::InternalError("refused");
                                       }),
                                  Push(after)};
    const auto error =
        StatusIs(absl::StatusCode::kInternal, HasSubstr("refused"));
    TESSERA_EXPECT_OK(futures[0].Wait());
    EXPECT_THAT(futures[1].Wait(), error);
    EXPECT_THAT(futures[2].Wait(), error);
    EXPECT_EQ(fails->slices.size(), 2u);
    EXPECT_THAT(after->slices, IsEmpty());
    ExpectStaysFailed(error);
    before->ChangeInMemory(0);
    before->ExpectAsInMemory();
  }
}

TEST_P(UpdateStreamTest, AFailedReadIsNamed) {
  MakeStream();
  TestUnit* const before = AddUnit(kSlice);
  TestUnit* const fails = AddUnit(6 * kSlice);
  Push(fails);
  TESSERA_ASSERT_OK(stream_->Drain());
  fails->slices.clear();
  Fail(/*writes=*/false, fails->states[1], 3 * kSlice * 4);
  const CommFuture futures[] = {Push(before), Push(fails), Push(AddUnit(10))};
  const auto error =
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr("reading"), HasSubstr("of state 1 of unit 1 ")));
  TESSERA_EXPECT_OK(futures[0].Wait());
  EXPECT_THAT(futures[1].Wait(), error);
  EXPECT_THAT(futures[2].Wait(), error);
  EXPECT_EQ(fails->slices.size(), 3u);  // those before it
  ExpectStaysFailed(error);
}

TEST_P(UpdateStreamTest, AFailedWriteIsNamed) {
  // The last slice of all, or one whose buffer others wait for.
  for (const int64_t slices : {int64_t{1}, int64_t{9}}) {
    MakeStream(2);
    TestUnit* const fails = AddUnit(slices * kSlice);
    Fail(/*writes=*/true, fails->states[1], 0);
    const auto error = StatusIs(
        absl::StatusCode::kUnavailable,
        AllOf(HasSubstr("writing"),
              HasSubstr(absl::StrCat("of ", fails->states[1].what(), " "))));
    const CommFuture future = Push(fails);
    if (slices == 1) {
      TESSERA_EXPECT_OK(future.Wait());  // which says nothing of writes
    } else {
      EXPECT_THAT(future.Wait(), error);
      EXPECT_LT(fails->slices.size(), 9u);
    }
    ExpectStaysFailed(error);
  }
}

TEST_P(UpdateStreamTest, WithoutAThreadThereIsNone) {
  file_ = Open();
  const NoThreads none;
  EXPECT_THAT(UpdateStream::Create(file_, {}),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("tessera-update")));
}

}  // namespace
}  // namespace tessera
