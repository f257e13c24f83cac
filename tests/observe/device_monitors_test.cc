// Tests what monitors write of a training on a device. It is a test of its own,
// since libtorch counts devices at a process's first backward.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "testing/device/test_device.h"
#include "tests/observe/metrics_lines.h"
#include "tests/support/at_start.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

using ::testing::SizeIs;

constexpr int kWorldSize = 2;

// Figures that a device decides are known later, and are reported nevertheless.
TEST(DeviceMonitorsTest, NothingIsLeftOut) {
  const TempFolder temp;
  for (const char* device : {"1", "1/workers"}) {
    const std::string folder = temp / absl::StrCat("of_", device);
    TrainingSpec spec;
    spec.stage = 2;
    spec.more = Everything(folder);
    spec.device = device;
    spec.clipping = 0.5;
    ExpectEqualsOracle(spec, kWorldSize);
    const std::vector<Line> lines = LinesOf(folder);
    ASSERT_THAT(lines, SizeIs(spec.steps)) << device;
    for (int i = 0; i < spec.steps; ++i) {
      EXPECT_EQ(lines[static_cast<size_t>(i)].at("step"), i + 1);
      EXPECT_GT(lines[static_cast<size_t>(i)].at("grad_norm"), 0);
      EXPECT_GT(lines[static_cast<size_t>(i)].at("loss"), 0);
    }
  }
}

// A rank that has run out of data has no loss on its device to wait for; its
// numbers go to the others in the same place all the same. (Each third weight
// is 0, of each rank in another step.)
TEST(DeviceMonitorsTest, ARankMayHaveNoData) {
  const TempFolder folder;
  TrainingSpec spec;
  spec.stage = 3;
  spec.more = Jsonl(folder.path());
  spec.device = "1/workers";
  spec.weights = true;
  spec.steps = 4;
  ExpectEqualsOracle(spec, kWorldSize);
  EXPECT_THAT(LinesOf(folder.path()), SizeIs(4));
}

}  // namespace
}  // namespace tessera
