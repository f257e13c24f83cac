// Engines that end without Close while a device without hardware works for
// them.
#include <string>
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
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using ::testing::Each;

// `args` is "way|" or "way|before". An engine ends without Close during its
// last step, or before it, while gradients leave for the host.
TESSERA_RANK_FUNCTION(EndsAfterAStep) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                           DeviceRun::Make(WayOf(words[0]), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  if (words[1] == "before") TESSERA_RETURN_IF_ERROR(run.Backward());
  run.engine = nullptr;
  testdevice::CheckFreed();
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  for (const auto& fault : testdevice::Faults()) return fault.message;
  return "ended";
}

TEST(DeviceEnds, AnEngineMayEndWhileItsStepIsBeingMade) {
  for (const int stage : {1, 2, 3}) {
    for (const int offload : {1, stage == 3 ? 3 : 2}) {
      for (const char* when : {"", "before"}) {
        const Way way{"1/workers", stage, 0.5, 2, kBf16, 0, offload};
        const std::string args = absl::StrCat(TextOf(way), "|", when);
        EXPECT_THAT(RankPool::Get(2)->Run("EndsAfterAStep", args),
                    Each(IsOkAndHolds("ended")))
            << args;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
