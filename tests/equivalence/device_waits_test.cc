// A step on a device without hardware waits for nothing.
#include <sched.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/equivalence/device_run.h"
#include "tests/support/at_start.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

using ::testing::Each;

// Returns how often each thread has waited for the device since the last call.
std::string TakeWaits() {
  std::string waits;
  for (const auto& each : testdevice::HostWaits()) {
    absl::StrAppend(&waits, each.times, " ", each.what, ";");
  }
  testdevice::ResetHostWaits();
  return waits;
}

// args: "way|reads". Returns the waits of six steps, the last of which reads
// the loss if `reads` is "loss".
TESSERA_RANK_FUNCTION(Waits) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                           DeviceRun::Make(WayOf(words[0]), world));
  testdevice::ResetHostWaits();
  for (int step = 0; step < 6; ++step) {
    const at::Tensor loss = run.net->forward(run.x);
    TESSERA_RETURN_IF_ERROR(run.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
    if (words[1] == "loss" && step == 5) loss.item();
  }
  const std::string waits = TakeWaits();
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return waits;
}

TEST(WaitsTest, NoThreadWaitsForTheDevice) {
  for (int world_size : {1, 2}) {
    for (int stage : {0, 1, 2, 3}) {
      for (const double clipping : {0.0, 0.5}) {
        // 2^30 overflows in all of these steps.
        for (const int fp16 : {kFp32, kBf16, 30}) {
          const Way way{"1", stage, clipping, 2, fp16};
          EXPECT_THAT(
              RankPool::Get(world_size)->Run("Waits", TextOf(way) + "|"),
              Each(IsOkAndHolds("")))
              << "W " << world_size << ": " << TextOf(way);
        }
      }
    }
  }
}

// With states on the host the program's threads wait for no stream, and the
// thread that updates states there waits for the gradients.
TEST(WaitsTest, NorWithStatesOnTheHost) {
  for (int world_size : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      for (const double clipping : {0.0, 0.5}) {
        for (const int fp16 : {kFp32, 30}) {
          const Way way{"1", stage, clipping, 2, fp16, 0, stage == 3 ? 2 : 1};
          EXPECT_THAT(
              RankPool::Get(world_size)->Run("Waits", TextOf(way) + "|"),
              Each(IsOkAndHolds("")))
              << "W " << world_size << ": " << TextOf(way);
        }
      }
    }
  }
}

// Returns the waits on a device that comes to its work later.
TESSERA_RANK_FUNCTION(Waiters) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  testdevice::ResetHostWaits();
  for (int step = 0; step < 6; ++step) {
    TESSERA_RETURN_IF_ERROR(run.TrainStep());
  }
  std::set<std::string> threads;
  for (const auto& each : testdevice::HostWaits()) threads.insert(each.thread);
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return absl::StrJoin(threads, " ");
}

TEST(WaitsTest, OnlyTheUpdateOfStatesOnTheHostWaits) {
  for (const int stage : {1, 2, 3}) {
    const Way way{"1/workers", stage, 0.5, 2, kBf16, 0, stage == 3 ? 2 : 1};
    EXPECT_THAT(RankPool::Get(2)->Run("Waiters", TextOf(way)),
                Each(IsOkAndHolds("tessera-update")))
        << TextOf(way);
  }
}

// Returns what a forward has computed after a step on a device that comes to
// its work only when the step has returned.
TESSERA_RANK_FUNCTION(StepsAhead) {
  Way way = WayOf(args);
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(way, world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  run.net->forward(run.x);  // the update of states there is over
  auto returned = std::make_shared<std::atomic<bool>>(false);
  if (!way.device.empty()) {
    testdevice::Launch(c10::impl::VirtualGuardImpl(run.x.device().type())
                           .getStream(run.x.device()),
                       "long work", {}, [returned] {
                         while (!*returned) sched_yield();
                       });
  }
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  *returned = true;
  const std::string loss = PrintOf(run.net->forward(run.x).cpu());
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return loss;
}

// Not for the update of states on the host either: each unit's next use does.
TEST(WaitsTest, StepReturnsBeforeItsUpdateOnTheHost) {
  for (int world_size : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      Way way{"", stage, 0.5};
      RankPool* const pool = RankPool::Get(world_size);
      const auto want = pool->Run("StepsAhead", TextOf(way));
      way.device = "1/workers";
      way.offload = 1;
      way.overlap = true;
      const auto got = pool->Run("StepsAhead", TextOf(way), absl::Seconds(30));
      ASSERT_THAT(want, Each(IsOk()));
      EXPECT_THAT(got, Each(IsOkAndHolds(*want[0])))
          << "W " << world_size << ": " << TextOf(way);
    }
  }
}

// This norm has a root without a kernel.
TEST(WaitsTest, ANormThatTheHostFindsWaitsOnceAStep) {
  EXPECT_THAT(RankPool::Get(2)->Run("Waits", TextOf(Way{"1", 3, 0.5, 3}) + "|"),
              Each(IsOkAndHolds("6 blocking aten::copy_ to the host;")));
}

TEST(WaitsTest, ReadingALossWaitsForIt) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("Waits", TextOf(Way{"1", 3, 0.5, 2, 8}) + "|loss"),
      Each(IsOkAndHolds("1 item;")));
}

// Returns what asking waits for on a device that comes to its work later.
TESSERA_RANK_FUNCTION(Asks) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  testdevice::ResetHostWaits();
  const bool skipped = run.engine->last_step().skipped;
  const double norm = run.engine->last_step().clipped_norm;
  const int64_t step = run.engine->step();
  const std::string waits = TakeWaits();
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  const bool once = waits.empty() || waits == "1 synchronize event;";
  return absl::StrCat(once ? "at most once" : waits, skipped, step,
                      norm <= 0.5);
}

TEST(WaitsTest, AskingForTheLastStepWaitsAtMostOnce) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("Asks", TextOf(Way{"1/workers", 3, 0.5, 2, 8})),
      Each(IsOkAndHolds("at most once011")));
}

}  // namespace
}  // namespace tessera
