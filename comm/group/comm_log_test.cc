// The ring of collectives, the log, and that every collective reaches both.
#include "comm/record/comm_log.h"

#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/file.h"
#include "base/monotonic.h"
#include "base/status_matchers.h"
#include "base/trace/trace.h"
#include "comm/communicator.h"
#include "comm/group/group_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/record/flight_recorder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::SizeIs;

CollectiveRecord AllReduceOf(const std::string& what, int64_t bytes) {
  CollectiveRecord record;
  record.op = CollectiveOp::kAllReduce;
  record.what = what;
  record.bytes = bytes;
  record.dtype = "float32";
  record.reduce = "sum";
  return record;
}

TEST(FlightRecorderTest, KeepsTheLast256InOrder) {
  FlightRecorder ring;
  EXPECT_THAT(ring.Snapshot(), IsEmpty());
  for (int i = 1; i <= 300; ++i) {
    const int64_t ticket = ring.Enqueue(AllReduceOf(absl::StrCat("u", i), i));
    EXPECT_EQ(ticket, i);
    ring.Enter(ticket, i);
    ring.Leave(ticket, absl::OkStatus());
  }
  const std::vector<CollectiveRecord> kept = ring.Snapshot();
  ASSERT_THAT(kept, SizeIs(256));
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(kept[i].ticket, 45 + i);
    EXPECT_EQ(kept[i].what, absl::StrCat("u", 45 + i));
    EXPECT_LE(kept[i].enqueued, kept[i].entered);
    EXPECT_LE(kept[i].entered, kept[i].left);
  }
}

TEST(FlightRecorderTest, ATicketThatIsGoneChangesNothing) {
  FlightRecorder ring;
  const int64_t old = ring.Enqueue(AllReduceOf("old", 1));
  for (int i = 0; i < 256; ++i) ring.Enqueue(AllReduceOf("new", 1));
  ring.Enter(old, 77);
  ring.Leave(old, absl::InternalError("x"));
  for (const CollectiveRecord& record : ring.Snapshot()) {
    EXPECT_EQ(record.what, "new");
    EXPECT_EQ(record.sequence, 0);
    EXPECT_TRUE(record.status.ok());
  }
}

TEST(FlightRecorderTest, TextTellsQueuedRunningDoneAndFailed) {
  FlightRecorder ring;
  for (const char* what : {"done one", "failed one", "running one"}) {
    ring.Enter(ring.Enqueue(AllReduceOf(what, 4000)), 41);
  }
  ring.Leave(1, absl::OkStatus());
  ring.Leave(2, absl::DataLossError("bad sector"));
  ring.Enqueue(AllReduceOf("queued one", 4));
  const std::string text = ring.ToText();
  EXPECT_THAT(text, MatchesRegex("(#41.* done .*done one.*\n)"
                                 "(#41.* FAILED .*bad sector\n)"
                                 "(#41.* RUNNING .*running one.*\n)"
                                 "(- .* queued .*queued one.*\n)"));
  EXPECT_THAT(text, HasSubstr("all-reduce sum, 4000 bytes of float32"));
  EXPECT_THAT(ring.ToText(1), Not(HasSubstr("running one")));
}

TEST(FlightRecorderTest, MayBeReadWhileItIsWritten) {
  FlightRecorder ring;
  std::thread writer([&] {
    for (int i = 1; i <= 20000; ++i) {
      const int64_t ticket = ring.Enqueue(AllReduceOf(absl::StrCat(i), i));
      ring.Enter(ticket, ticket);
      ring.Leave(ticket, absl::OkStatus());
    }
  });
  std::vector<CollectiveRecord> kept;
  do {
    kept = ring.Snapshot();
    for (size_t i = 0; i < kept.size(); ++i) {
      // Whole: never half of one record and half of another.
      ASSERT_EQ(kept[i].what, absl::StrCat(kept[i].bytes));
      ASSERT_EQ(kept[i].ticket, kept[0].ticket + static_cast<int64_t>(i));
    }
  } while (kept.empty() || kept.back().ticket < 20000);
  writer.join();
}

TEST(FlightRecorderDeathTest, AFailedCheckTellsTheLastCollectives) {
  EXPECT_DEATH(
      {
        FlightRecorder ring;
        ring.Enter(ring.Enqueue(AllReduceOf("unit layers.7", 64)), 41);
        TESSERA_CHECK(false) << "broken";
      },
      "#41 .*RUNNING.*unit layers.7");
}

TEST(CommLogTest, BusBandwidthIsThatOfNcclTests) {
  EXPECT_DOUBLE_EQ(BusFactor(CollectiveOp::kAllReduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(BusFactor(CollectiveOp::kAllGather, 4), 0.75);
  EXPECT_DOUBLE_EQ(BusFactor(CollectiveOp::kReduceScatter, 8), 0.875);
  EXPECT_DOUBLE_EQ(BusFactor(CollectiveOp::kBroadcast, 4), 1);
}

CollectiveRecord Took(CollectiveRecord record, absl::Duration begin,
                      absl::Duration took) {
  record.enqueued = begin - absl::Milliseconds(1);
  record.entered = begin;
  record.left = begin + took;
  return record;
}

TEST(CommLogTest, SumsByOperationAndByUnit) {
  CommLog log({/*rank=*/1, /*world_size=*/4});
  const absl::Duration t = absl::Seconds(100);
  log.Add(Took(AllReduceOf("unit a", 1000000), t, absl::Milliseconds(1)));
  log.Add(Took(AllReduceOf("unit a", 1000000), t, absl::Milliseconds(3)));
  log.Add(Took(AllReduceOf("unit b", 2000000), t, absl::Milliseconds(6)));
  log.AddWait(2, absl::Milliseconds(5));
  log.AddWait(2, absl::Milliseconds(2));
  const std::string text = log.ToText("gloo");
  EXPECT_THAT(text, HasSubstr("collectives of rank 1 of 4, gloo"));
  // 4 MB in 10 ms: 0.4 GB/s, and 1.5 of that on the bus.
  EXPECT_THAT(text, testing::ContainsRegex(
                        "all-reduce +3 +4000000 +10.0 +3.333 +6.000 +0.400 "
                        "+0.600  all\n"));
  EXPECT_THAT(text, testing::ContainsRegex(
                        "all-reduce +2 +2000000 +4.0 +2.000 +3.000 +0.500 "
                        "+0.750  unit a\n"));
  EXPECT_LT(text.find("unit b"), text.find("unit a"));  // the longest first
  EXPECT_THAT(text, HasSubstr("waited for rank 2: 7.000 ms\n"));
  EXPECT_THAT(text, Not(HasSubstr("waited for rank 1")));
  EXPECT_THAT(log.waits(),
              ElementsAre(absl::ZeroDuration(), absl::ZeroDuration(),
                          absl::Milliseconds(7), absl::ZeroDuration()));
}

TEST(CommLogTest, SmallRowsAreCountedWhereTheyAreNotWanted) {
  CommLog log({0, 2});
  const absl::Duration t = absl::Seconds(100);
  log.Add(Took(AllReduceOf("unit a", 1), t, absl::Milliseconds(970)));
  log.Add(Took(AllReduceOf("unit b", 1), t, absl::Milliseconds(20)));
  log.Add(Took(AllReduceOf("unit c", 1), t, absl::Milliseconds(6)));
  CollectiveRecord failed =
      Took(AllReduceOf("unit d", 1), t, absl::Milliseconds(1));
  failed.status = absl::UnavailableError("gone");
  log.Add(failed);
  log.Add(Took(AllReduceOf("unit e", 1), t, absl::Milliseconds(3)));
  EXPECT_THAT(log.ToText("gloo"),
              AllOf(HasSubstr("unit c\n"), Not(HasSubstr("more row"))));
  EXPECT_THAT(log.ToText("gloo", 0.01),
              AllOf(HasSubstr("unit a\n"), HasSubstr("unit b\n"),
                    HasSubstr("unit d (1 failed)\n"), Not(HasSubstr("unit c")),
                    Not(HasSubstr("unit e")),
                    HasSubstr("(2 more rows, 9.0 ms in all)\n")));
}

TEST(CommLogTest, ManyUnitsAreCountedTogether) {
  CommLog log({0, 2});
  for (size_t i = 0; i < CommLog::kMaxUnits + 10; ++i) {
    log.Add(Took(AllReduceOf(absl::StrCat("u", i), 1), absl::Seconds(1),
                 absl::Milliseconds(1)));
  }
  EXPECT_THAT(log.ToText("gloo"),
              testing::ContainsRegex("all-reduce +10 .*\\(others\\)"));
}

TEST(CommLogTest, ACollectiveIsASpanOfATrace) {
  CommLog log({0, 2});
  auto record = Took(AllReduceOf("sum of unit a\"b", 1), absl::Microseconds(10),
                     absl::Microseconds(7));
  record.sequence = 5;
  record.group = "nodes 1.0";
  log.Add(record);
  ASSERT_TRUE(StartTrace());
  record.entered = MonotonicNow();
  record.enqueued = record.entered - absl::Microseconds(3);
  record.left = record.entered + absl::Microseconds(9);
  log.Add(record);
  const TraceRecording trace = StopTrace();
  ASSERT_EQ(trace.spans.size(), 1u);
  const TraceSpan& span = trace.spans[0];
  EXPECT_EQ(span.track, TraceTrack::kCommunication);
  EXPECT_EQ(span.name, "sum of unit a\"b");
  EXPECT_EQ(span.unit, "a\"b");
  EXPECT_EQ(span.end - span.begin, 9000);
  EXPECT_EQ(span.bytes, record.bytes);
  EXPECT_THAT(span.args,
              AllOf(HasSubstr("\"op\":\"all-reduce\",\"sequence\":5"),
                    HasSubstr("\"group\":\"nodes 1.0\",\"queued_us\":3.000"),
                    HasSubstr("\"status\":\"ok\"")));
}

TEST(CommLogTest, TheTablesAreWrittenWhereTheEnvironmentSays) {
  const std::string dir = testing::TempDir();
  TESSERA_EXPECT_OK(WriteCommLog("report", 0));  // nothing wanted
  setenv("TESSERA_COMM_LOG", (dir + "/log.txt").c_str(), 1);
  TESSERA_EXPECT_OK(WriteCommLog("of rank 0", 0));
  TESSERA_EXPECT_OK(WriteCommLog("of rank 1", 1));
  EXPECT_THAT(ReadWholeFile(dir + "/log.txt"), IsOkAndHolds("of rank 0"));
  setenv("TESSERA_COMM_LOG", "/nonexistent/folder/log", 1);
  EXPECT_THAT(WriteCommLog("x", 0),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("cannot write /nonexistent/folder/log: ")));
  unsetenv("TESSERA_COMM_LOG");
}

TEST(GroupCommunicatorTest, EveryCollectiveIsRecordedWithItsCallSite) {
  auto comm = std::dynamic_pointer_cast<GroupCommunicator>(
      std::shared_ptr<Communicator>(MakeSelfCommunicator()));
  at::Tensor t = torch::ones({10});
  at::Tensor d = torch::ones({3}, torch::kDouble);
  TESSERA_ASSERT_OK(comm->AllGather(t, t, {"gather of a"}).Wait());
  TESSERA_ASSERT_OK(comm->ReduceScatterSum(t, t, {"scatter of b"}).Wait());
  const int line = __LINE__ + 1;
  TESSERA_ASSERT_OK(comm->AllReduceSum(d, CommTag{"reduce of c"}).Wait());
  TESSERA_ASSERT_OK(comm->Broadcast(d, 0, {}).Wait());
  TESSERA_ASSERT_OK(comm->Barrier("the end"));
  const std::vector<CollectiveRecord> ring = comm->recorder().Snapshot();
  ASSERT_THAT(ring, SizeIs(5));
  const std::vector<std::string> expected = {
      "gather of a: all-gather, 40 bytes of float32",
      "scatter of b: reduce-scatter sum, 40 bytes of float32",
      "reduce of c: all-reduce sum, 24 bytes of float64",
      "broadcast: broadcast from rank 0, 24 bytes of float64",
      "the end: agreement"};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(absl::StrCat(ring[i].what, ": ", ring[i].Describe()),
              expected[i]);
    EXPECT_EQ(ring[i].sequence, i + 1);
    EXPECT_GT(ring[i].left, absl::ZeroDuration());
    EXPECT_THAT(ring[i].site.file, HasSubstr("comm/group/comm_log_test.cc"));
  }
  EXPECT_EQ(ring[2].site.line, line);
  EXPECT_EQ(ring[3].site.line, line + 1);
  EXPECT_EQ(ring[4].site.line, line + 2);
  EXPECT_THAT(comm->Report(),
              testing::ContainsRegex("all-reduce +1 +24 .*  reduce of c\n"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto waited, comm->WaitedForByAll());
  EXPECT_THAT(waited, ElementsAre(absl::ZeroDuration()));
}

}  // namespace
}  // namespace tessera
