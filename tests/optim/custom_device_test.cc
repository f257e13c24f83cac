// Runs a program's own optimizer on a device without hardware
// (testing/device/test_device.h): it has the bits of the CPU.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/optim/custom_run.h"
#include "tests/support/at_start.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

using ::testing::Each;
using ::testing::HasSubstr;

// The device decides whether there is a step, with its states there or on the
// host. This comes before the CPU, since the device must come first.
TEST(CustomDeviceTest, IsAsOnTheCpu) {
  for (const char* words :
       {"dtype=bf16 clipping=yes", "dtype=fp16 steps=20 clipping=yes"}) {
    std::vector<std::vector<std::string>> all;
    for (const char* how :
         {"stage=1 device=1 own=own", "stage=3 device=1 own=own",
          "stage=3 offload=cpu device=1 own=own", "stage=1 own=exact"}) {
      all.push_back(Train(2, absl::StrCat(how, " ", words)));
      EXPECT_THAT(all.back(), Each(HasSubstr("parameter in.weight"))) << how;
    }
    EXPECT_THAT(all, Each(all.back())) << words;
  }
}

}  // namespace
}  // namespace tessera
