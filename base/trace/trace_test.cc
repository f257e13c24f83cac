#include "base/trace/trace.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "base/trace/trace_json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(TraceTest, NothingIsKeptUnlessItIsRecorded) {
  { const TraceScope scope(TraceTrack::kMain, "before"); }
  ASSERT_TRUE(StartTrace());
  EXPECT_FALSE(StartTrace());  // one at a time
  { const TraceScope scope(TraceTrack::kReduce, "within", "a", 12); }
  const TraceRecording recording = StopTrace();
  { const TraceScope scope(TraceTrack::kMain, "after"); }
  ASSERT_EQ(recording.spans.size(), 1u);
  const TraceSpan& span = recording.spans[0];
  EXPECT_EQ(span.name, "within");
  EXPECT_EQ(span.unit, "a");
  EXPECT_EQ(span.bytes, 12);
  EXPECT_LE(recording.begin, span.begin);
  EXPECT_LE(span.begin, span.end);
  EXPECT_LE(span.end, recording.end);
  EXPECT_TRUE(StopTrace().spans.empty());
}

// A scope that began before is cut off; one that ended before is of the past.
TEST(TraceTest, WhatBeganBeforeIsCutOff) {
  const int64_t before = TraceNow();
  ASSERT_TRUE(StartTrace());
  AddTraceSpan({TraceTrack::kMain, "past", before - 2, before - 1});
  AddTraceSpan({TraceTrack::kMain, "begun", before - 2, TraceNow()});
  const TraceRecording recording = StopTrace();
  ASSERT_EQ(recording.spans.size(), 1u);
  EXPECT_EQ(recording.spans[0].begin, recording.begin);
}

TEST(TraceTest, AWaitIsASpan) {
  ASSERT_TRUE(StartTrace());
  const int64_t now = TraceNow();
  NoteExposedWait(WaitReason::kGather, "all-gather of unit blocks.3", now,
                  now + 5);
  const TraceRecording recording = StopTrace();
  ASSERT_EQ(recording.spans.size(), 1u);
  EXPECT_EQ(recording.spans[0].track, TraceTrack::kMain);
  EXPECT_EQ(recording.spans[0].name, "wait: all-gather of unit blocks.3");
  EXPECT_EQ(recording.spans[0].unit, "blocks.3");
  EXPECT_EQ(recording.spans[0].args, "\"wait\":\"gather\"");
}

TEST(TraceTest, UnitsAreFoundInTexts) {
  EXPECT_EQ(UnitInText("all-gather of unit blocks.3"), "blocks.3");
  EXPECT_EQ(UnitInText("reduction of the gradients of unit a.b, over replicas"),
            "a.b");
  EXPECT_EQ(UnitInText("gather of unit a of group nodes 1.0"), "a");
  EXPECT_EQ(UnitInText("gradient norm"), "");
}

TEST(TraceTest, MemoryIsBounded) {
  ASSERT_TRUE(StartTrace());
  const int64_t now = TraceNow();
  for (size_t i = 0; i < TraceRecording::kMaxSpans + 3; ++i) {
    AddTraceSpan({TraceTrack::kMain, "x", now, now});
  }
  const TraceRecording recording = StopTrace();
  EXPECT_EQ(recording.spans.size(), TraceRecording::kMaxSpans);
  EXPECT_EQ(recording.left_out, 3);
}

TEST(TraceTest, AnyThreadMayAdd) {
  ASSERT_TRUE(StartTrace());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) {
        const TraceScope scope(TraceTrack::kPulls, "pull");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(StopTrace().spans.size(), 4000u);
}

// Spans within each other share a row; spans that cross have two.
TEST(TraceJsonTest, RowsHoldSpansThatNest) {
  TraceRecording recording;
  recording.spans = {{TraceTrack::kGather, "outer", 1000, 9000},
                     {TraceTrack::kGather, "inner", 2000, 3000},
                     {TraceTrack::kGather, "crossing", 8000, 12000},
                     {TraceTrack::kGather, "after", 9000, 10000}};
  const std::string json = TraceToJson(recording, {/*rank=*/2, 4, "host"});
  const auto thread_of = [&](absl::string_view name) {
    const size_t at = json.find(absl::StrCat("\"name\":\"", name, "\""));
    const size_t tid = json.find("\"tid\":", at);
    return json.substr(tid + 6, 3);
  };
  EXPECT_EQ(thread_of("inner"), thread_of("outer"));
  EXPECT_EQ(thread_of("after"), thread_of("outer"));
  EXPECT_NE(thread_of("crossing"), thread_of("outer"));
  EXPECT_THAT(json, HasSubstr("\"name\":\"gather 2\""));
  EXPECT_THAT(json, HasSubstr("\"ts\":1.000,\"dur\":8.000,\"pid\":2"));
  EXPECT_THAT(json, HasSubstr("\"rank\":2,\"world_size\":4"));
}

TEST(TraceJsonTest, NamesAreEscaped) {
  TraceRecording recording;
  recording.spans = {
      {TraceTrack::kMain, "a\"b\n", 1, 2, "u\\", 3, "\"step\":4"}};
  EXPECT_THAT(TraceToJson(recording, {}),
              HasSubstr("\"args\":{\"unit\":\"u\\\\\",\"bytes\":3,"
                        "\"step\":4}"));
  EXPECT_THAT(TraceToJson(recording, {}), HasSubstr("\"a\\\"b\\u000a\""));
}

TEST(WriteFileAtomicallyTest, WritesAllOrNothing) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/atomic");
  const std::string path = absl::StrCat(dir, "/new/file");
  TESSERA_ASSERT_OK(WriteFileAtomically(path, "one"));
  TESSERA_ASSERT_OK(WriteFileAtomically(path, "two"));
  EXPECT_EQ(*ReadWholeFile(path), "two");
  // There is no path below a file.
  EXPECT_THAT(WriteFileAtomically(absl::StrCat(path, "/x"), "three").message(),
              HasSubstr(path));
  // A folder is not replaced, and nothing is left beside it.
  EXPECT_FALSE(WriteFileAtomically(absl::StrCat(dir, "/new"), "four").ok());
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    (void)entry;
    ++entries;
  }
  EXPECT_EQ(entries, 1);
  EXPECT_EQ(*ReadWholeFile(path), "two");
}

}  // namespace
}  // namespace tessera
