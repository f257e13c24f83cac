#include "offload/pinned_settings.h"

#include <string>

#include "c10/core/AllocatorConfig.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(PinnedSettingsTest, AreAddedToWhatIsSet) {
  EXPECT_EQ(PinnedSettings("", 16),
            "pinned_use_cuda_host_register:True,pinned_num_register_threads:8");
  EXPECT_EQ(PinnedSettings("expandable_segments:True, "
                           "roundup_power2_divisions:[256:1,512:2,>:4],",
                           16),
            "expandable_segments:True, roundup_power2_divisions:[256:1,512:2,"
            ">:4],pinned_use_cuda_host_register:True,"
            "pinned_num_register_threads:8");
}

TEST(PinnedSettingsTest, ThreadsAreAPowerOfTwoThatTheProcessMayUse) {
  const auto threads = [](int processors) {
    const std::string all = PinnedSettings("", processors);
    return all.substr(all.rfind(':') + 1);
  };
  EXPECT_EQ(threads(0), "1");
  EXPECT_EQ(threads(1), "1");
  EXPECT_EQ(threads(3), "2");
  EXPECT_EQ(threads(7), "4");
  EXPECT_EQ(threads(8), "8");
  EXPECT_EQ(threads(200), "8");
}

TEST(PinnedSettingsTest, AUsersChoiceStays) {
  EXPECT_EQ(PinnedSettings("pinned_use_cuda_host_register:False", 8), "");
  EXPECT_EQ(
      PinnedSettings("backend:native, pinned_use_cuda_host_register :True", 8),
      "");
  EXPECT_EQ(PinnedSettings("pinned_num_register_threads:2", 8),
            "pinned_num_register_threads:2,pinned_use_cuda_host_register:True");
}

TEST(PinnedSettingsTest, NothingIsSetWithoutCuda) {
  const std::string before = c10::CachingAllocator::getAllocatorSettings();
  SetPinnedSettings();
  if (before.find("pinned") == std::string::npos) {
    EXPECT_EQ(c10::CachingAllocator::getAllocatorSettings(), before);
  }
}

}  // namespace
}  // namespace tessera
