#include "base/memory/available_memory.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest() {
    Write("/proc/meminfo",
          "MemTotal:       1000 kB\nMemFree:         10 kB\n"
          "MemAvailable:    600 kB\nHugePages_Total:   0\n");
  }
  ~AvailableMemoryTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void Group(const std::string& path, const std::string& limit, int64_t used) {
    Write("/sys/fs/cgroup" + path + "/memory.max", limit);
    Write("/sys/fs/cgroup" + path + "/memory.current", std::to_string(used));
  }
  const std::string root_ =
      ::testing::TempDir() + "/" +
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(AvailableMemoryTest, TakesTheKernelsWord) {
  EXPECT_EQ(AvailableHostMemory(root_).value(), 600 * 1024);
}

TEST_F(AvailableMemoryTest, NoMoreThanAGroupAboveLeaves) {
  Write("/proc/self/cgroup", "0::/job/step\n");
  Group("/job/step", "max", 5);
  EXPECT_EQ(AvailableHostMemory(root_).value(), 600 * 1024);
  Group("/job", "300000", 100000);
  EXPECT_EQ(AvailableHostMemory(root_).value(), 200000);
  Group("/job", "300000", 400000);
  EXPECT_EQ(AvailableHostMemory(root_).value(), 0);
}

TEST_F(AvailableMemoryTest, SaysWhereNothingIsSaid) {
  Write("/proc/meminfo", "MemTotal: 5 kB\n");
  EXPECT_EQ(AvailableHostMemory(root_).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(AvailableHostMemory, IsKnownHere) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const int64_t bytes, AvailableHostMemory());
  EXPECT_GT(bytes, 0);
}

}  // namespace
}  // namespace tessera
