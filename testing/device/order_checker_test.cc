#include "testing/device/order_checker.h"

#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

class OrderCheckerTest : public ::testing::Test {
 protected:
  OrderCheckerTest()
      : one_(checker_.AddStream("stream 1", 0)),
        two_(checker_.AddStream("stream 2", 0)),
        elsewhere_(checker_.AddStream("stream 3", 1)) {
    checker_.Allocate(one_, 0, kBlock, 1000, "a tensor");
  }

  void Run(int stream, const std::string& what, uintptr_t begin, uintptr_t end,
           bool writes) {
    checker_.Launch(stream, what, {{kBlock + begin, kBlock + end, writes, 0}},
                    [](int) { return "its argument x"; });
  }
  void Write(int stream, const std::string& what, uintptr_t begin = 0,
             uintptr_t end = 1000) {
    Run(stream, what, begin, end, true);
  }
  void Read(int stream, const std::string& what, uintptr_t begin = 0,
            uintptr_t end = 1000) {
    Run(stream, what, begin, end, false);
  }
  // `second` waits for what `first` has by now.
  void Wait(int first, int second) {
    checker_.Block(second, checker_.Record(first));
  }

  static constexpr uintptr_t kBlock = 4096;
  OrderChecker checker_;
  int one_, two_, elsewhere_;
};

TEST_F(OrderCheckerTest, OneStreamIsInOrder) {
  Write(one_, "fill");
  Read(one_, "add");
  Write(one_, "mul");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, ReadOfWhatAnotherStreamWrites) {
  Write(one_, "fill", 0, 64);
  Read(two_, "add", 32, 96);
  ASSERT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReadTooEarly)));
  EXPECT_THAT(checker_.faults()[0].message,
              AllOf(HasSubstr("add on stream 2"), HasSubstr("its argument x"),
                    HasSubstr("fill on stream 1"), HasSubstr("bytes 32 to 64"),
                    HasSubstr("block 1 of 1000 bytes")));
}

TEST_F(OrderCheckerTest, AnEventOrdersThem) {
  Write(one_, "fill");
  Wait(one_, two_);
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, AnEventThatIsRecordedTooEarlyDoesNot) {
  const Clock before = checker_.Record(one_);
  Write(one_, "fill");
  checker_.Block(two_, before);
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReadTooEarly)));
}

TEST_F(OrderCheckerTest, OrderGoesOnThroughAThirdStream) {
  Write(one_, "fill");
  Wait(one_, elsewhere_);
  Wait(elsewhere_, two_);
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, TheHostsWaitOrdersWhatItLaunchesAfterwards) {
  Write(one_, "fill");
  checker_.HostWait(checker_.Record(one_));
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, WriteWhereAnotherStreamReads) {
  Write(one_, "fill");
  Wait(one_, two_);
  Read(two_, "add");
  Write(one_, "zero");
  ASSERT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
  EXPECT_THAT(checker_.faults()[0].message,
              AllOf(HasSubstr("zero on stream 1"), HasSubstr("add on stream 2"),
                    HasSubstr("which reads there")));
}

TEST_F(OrderCheckerTest, WriteWhereAnotherStreamWrites) {
  Wait(one_, two_);
  Write(one_, "fill");
  Write(two_, "zero");
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
}

TEST_F(OrderCheckerTest, ReadsNeedNoOrder) {
  Write(one_, "fill");
  Wait(one_, two_);
  Read(one_, "add");
  Read(two_, "sub");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

// Bytes beside each other are none of each other's matter.
TEST_F(OrderCheckerTest, OtherBytesNeedNoOrder) {
  Write(one_, "fill");
  Wait(one_, two_);
  Write(one_, "left", 0, 500);
  Write(two_, "right", 500, 1000);
  EXPECT_THAT(checker_.faults(), IsEmpty());
  Read(two_, "middle", 499, 501);
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReadTooEarly)));
}

TEST_F(OrderCheckerTest, ALaterWriteOfTheWholeForgetsItsParts) {
  for (uintptr_t at = 0; at < 1000; at += 100) Write(two_, "part", at, at + 7);
  checker_.ClearFaults();  // the block is of the other stream
  Wait(two_, one_);
  Write(one_, "all");
  Wait(one_, two_);
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

// ---- memory

TEST_F(OrderCheckerTest, AnotherStreamWaitsForTheOwnerOfNewMemory) {
  Write(one_, "fill");
  checker_.Allocate(one_, 0, 2 * kBlock, 100, "another");
  checker_.Launch(two_, "fill", {{2 * kBlock, 2 * kBlock + 100, true, 0}},
                  [](int) { return ""; });
  ASSERT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
  EXPECT_THAT(checker_.faults()[0].message,
              HasSubstr("what used this memory before on stream 1"));
}

// Stream 1 waits for what reads its memory before it gives it out again; who
// waits for an earlier event of stream 1 does not wait for that.
TEST_F(OrderCheckerTest, AnEventBeforeAWaitDoesNotKnowOfIt) {
  const Clock early = checker_.Record(one_);
  Wait(one_, elsewhere_);
  checker_.Launch(elsewhere_, "read", {}, [](int) { return ""; });
  Wait(elsewhere_, one_);
  checker_.Allocate(one_, 0, 2 * kBlock, 100, "another");
  checker_.Block(two_, early);
  checker_.Launch(two_, "fill", {{2 * kBlock, 2 * kBlock + 100, true, 0}},
                  [](int) { return ""; });
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kWriteTooEarly)));
}

TEST_F(OrderCheckerTest, AnotherThreadDoesNotKnowWhatThisOneWaitedFor) {
  Write(one_, "fill");
  std::thread([&] { checker_.HostWait(checker_.Record(one_)); }).join();
  Read(two_, "add");
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReadTooEarly)));
}

TEST_F(OrderCheckerTest, MemoryThatNobodyTakesIsLookedAtInTheEnd) {
  Wait(one_, two_);
  Read(two_, "add");
  checker_.Free(kBlock);
  EXPECT_THAT(checker_.faults(), IsEmpty());
  checker_.CheckFreed();
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReusedTooEarly)));
}

TEST_F(OrderCheckerTest, FreedWhileAnotherStreamReads) {
  Write(one_, "fill");
  Wait(one_, two_);
  Read(two_, "add");
  checker_.Free(kBlock);
  EXPECT_THAT(checker_.faults(), IsEmpty());
  checker_.Allocate(one_, 0, 2 * kBlock, 8, "another");
  ASSERT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReusedTooEarly)));
  EXPECT_THAT(checker_.faults()[0].message,
              AllOf(HasSubstr("block 1"), HasSubstr("add on stream 2"),
                    HasSubstr("stream 1")));
}

TEST_F(OrderCheckerTest, FreedWhileAnotherStreamReadsButWaitedForInTime) {
  Wait(one_, two_);
  Read(two_, "add");
  checker_.Free(kBlock);
  Wait(two_, one_);
  checker_.Allocate(one_, 0, kBlock, 1000, "another");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, FreedButRecordedOnTheStreamThatReads) {
  Wait(one_, two_);
  Read(two_, "add");
  checker_.RecordBlock(kBlock, two_);
  checker_.Free(kBlock);
  checker_.Allocate(one_, 0, kBlock, 1000, "another");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, RecordedOnOneStreamIsNotRecordedOnAnother) {
  const int third = checker_.AddStream("stream 4", 0);
  Wait(one_, two_);
  Wait(one_, third);
  Read(two_, "add");
  Read(third, "sub");
  checker_.RecordBlock(kBlock, two_);
  checker_.Free(kBlock);
  checker_.Allocate(one_, 0, kBlock, 1000, "another");
  ASSERT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kReusedTooEarly)));
  EXPECT_THAT(checker_.faults()[0].message, HasSubstr("sub on stream 4"));
}

TEST_F(OrderCheckerTest, AllocationsOfOtherStreamsDoNotTakeIt) {
  Wait(one_, two_);
  Read(two_, "add");
  checker_.Free(kBlock);
  checker_.Allocate(two_, 0, 2 * kBlock, 8, "another");
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, AccessAfterItWasFreed) {
  checker_.Free(kBlock);
  Read(one_, "add");
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kNotAllocated)));
}

TEST_F(OrderCheckerTest, AccessBeyondItsEnd) {
  Read(one_, "add", 990, 1001);
  EXPECT_THAT(checker_.faults(), ElementsAre(FaultOf(Kind::kNotAllocated)));
}

TEST_F(OrderCheckerTest, MemoryOfAnotherDevice) {
  Read(elsewhere_, "add");
  ASSERT_THAT(checker_.faults(), Not(IsEmpty()));
  EXPECT_THAT(checker_.faults()[0], FaultOf(Kind::kOtherDevice));
}

// ---- the host

TEST_F(OrderCheckerTest, TheHostReadsPinnedMemoryThatAStreamWrites) {
  checker_.AllocateOnHost(10 * kBlock, 100);
  const Access all{10 * kBlock, 10 * kBlock + 100, true, 0};
  checker_.Launch(one_, "copy", {all}, [](int) { return "its target"; });
  checker_.HostAccess("print", all);
  ASSERT_THAT(checker_.faults(),
              ElementsAre(FaultOf(Kind::kHostAccessTooEarly)));
  EXPECT_THAT(
      checker_.faults()[0].message,
      AllOf(HasSubstr("print by the host"), HasSubstr("copy on stream 1")));
  checker_.ClearFaults();
  checker_.HostWait(checker_.Record(one_));
  checker_.HostAccess("print", all);
  EXPECT_THAT(checker_.faults(), IsEmpty());
}

TEST_F(OrderCheckerTest, TheHostMayReadWhatAStreamOnlyReads) {
  checker_.AllocateOnHost(10 * kBlock, 100);
  const Access all{10 * kBlock, 10 * kBlock + 100, false, 0};
  checker_.Launch(one_, "copy", {all}, [](int) { return "its source"; });
  checker_.HostAccess("print", all);
  EXPECT_THAT(checker_.faults(), IsEmpty());
  checker_.HostAccess("overwrite", {all.begin, all.end, true, 0});
  EXPECT_THAT(checker_.faults(),
              ElementsAre(FaultOf(Kind::kHostAccessTooEarly)));
}

}  // namespace
}  // namespace testdevice
