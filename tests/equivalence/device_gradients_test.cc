// Gradients that leave their device, without hardware, before the step: the
// norm, changes, more micro-batches.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
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

constexpr char kToDevice[] = "aten::copy_ to the device";

struct Steps {
  Way way;
  int backwards = 1;  // of a step
  // "set": one of them, before the step; "frozen": a parameter has none.
  std::string change = "";
};

std::string TextOf(const Steps& steps) {
  return absl::StrCat(TextOf(steps.way), "|", steps.backwards, "|",
                      steps.change);
}

// args: Steps. Returns all observable state after three steps, and, apart from
// that, how many copies to the device the last of them has.
TESSERA_RANK_FUNCTION(GradientsLeave) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  const Way way = WayOf(words[0]);
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(way, world));
  if (words[2] == "frozen") run.net->b->bias.set_requires_grad(false);
  int64_t before = 0;
  for (int step = 0; step < 3; ++step) {
    before = testdevice::CountLaunches(kToDevice);
    for (int i = 0; i < std::stoi(words[1]); ++i) {
      TESSERA_RETURN_IF_ERROR(run.Backward(1 + i));
    }
    if (words[2] == "set") {
      TESSERA_RETURN_IF_ERROR(run.engine->SetGradient(
          "a.weight", torch::linspace(-1, 3, 54).view({9, 6})));
    }
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
  }
  run.net->forward(run.x);  // in which the step is over
  const int64_t copies = testdevice::CountLaunches(kToDevice) - before;
  TESSERA_ASSIGN_OR_RETURN(const std::string state, run.Finish());
  return absl::StrCat(copies, "|", state);
}

// Returns the two parts of what rank 0 answers.
std::pair<std::string, std::string> Train(int world_size, const Steps& steps) {
  const auto answers =
      RankPool::Get(world_size)->Run("GradientsLeave", TextOf(steps));
  EXPECT_THAT(answers, Each(IsOk())) << TextOf(steps);
  if (!answers[0].ok()) return {};
  return absl::StrSplit(*answers[0], absl::MaxSplits('|', 1));
}

// A unit's part of it is found before the unit's gradient leaves. With another
// backward the sums of before come back, to be added to.
TEST(DeviceGradientsTest, NoneComesBackForTheNorm) {
  for (const int world_size : {1, 2}) {
    for (const int backwards : {1, 2}) {
      Steps steps{{"1", 2}, backwards, backwards == 1 ? "frozen" : ""};
      steps.way.offload = 1;
      const std::string plain = Train(world_size, steps).first;
      steps.way.clipping = 0.5;
      EXPECT_EQ(Train(world_size, steps).first, plain)
          << world_size << ": " << TextOf(steps);
    }
  }
}

// In 16 bits they stay so, until something is added to them or they change.
TEST(DeviceGradientsTest, TheBitsAreThoseOfTheCpu) {
  for (const int world_size : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      for (const int fp16 : {kFp32, kBf16}) {
        for (const int backwards : {1, 2}) {
          for (const char* change : {"", "set", "frozen"}) {
            // A part of them, in which every pair occurs.
            const int sum = world_size + stage + (fp16 == kBf16) + backwards;
            if ((sum + (*change == 's')) % 2 == 0) continue;
            Steps steps{{"", stage, 0.5, 2, fp16}, backwards, change};
            const std::string want = Train(world_size, steps).second;
            steps.way.device = "1/workers";
            steps.way.offload = 1;
            EXPECT_EQ(Train(world_size, steps).second, want)
                << "W " << world_size << ": " << TextOf(steps);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
