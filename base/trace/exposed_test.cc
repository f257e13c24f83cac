#include "base/trace/exposed.h"

#include <set>
#include <thread>

#include "base/thread/start_thread.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(ExposedTest, SumsByReasonAndOverCommunicationAlone) {
  const int64_t before = ExposedCommNanos();
  const int64_t gathers = ExposedNanos(WaitReason::kGather);
  NoteExposedWait(WaitReason::kGather, "a", 100, 107);
  NoteExposedWait(WaitReason::kOther, "b", 100, 130);
  NoteExposedWait(WaitReason::kUpdate, "c", 100, 1100);
  NoteExposedWait(WaitReason::kDisk, "d", 100, 10100);
  EXPECT_EQ(ExposedNanos(WaitReason::kGather) - gathers, 7);
  EXPECT_EQ(ExposedCommNanos() - before, 37);
}

TEST(ExposedTest, ThreadsOfItsOwnWaitAtNobodysCost) {
  EXPECT_TRUE(WaitsAreExposed());
  bool own = true;
  StartThread("tessera-test", [&] { own = WaitsAreExposed(); })->join();
  EXPECT_FALSE(own);
  bool of_program = false;
  std::thread([&] { of_program = WaitsAreExposed(); }).join();
  EXPECT_TRUE(of_program);
}

TEST(ExposedTest, ReasonsHaveNames) {
  std::set<absl::string_view> names;
  for (int i = 0; i < kNumWaitReasons; ++i) {
    names.insert(WaitReasonName(static_cast<WaitReason>(i)));
  }
  EXPECT_EQ(names.size(), kNumWaitReasons);
  EXPECT_EQ(names.count(""), 0u);
}

}  // namespace
}  // namespace tessera
