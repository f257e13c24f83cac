#include "comm/launch/cpus.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ParseCpuListTest, ListsAndNonsense) {
  EXPECT_THAT(ParseCpuList("0-2,8,10-11"), ElementsAre(0, 1, 2, 8, 10, 11));
  EXPECT_THAT(ParseCpuList("5"), ElementsAre(5));
  for (const char* list : {"", "x", "3-1", "1-", "-1", "0,,1", "0-99999999"}) {
    EXPECT_THAT(ParseCpuList(list), IsEmpty()) << list;
  }
}

TEST(AllowedCpusTest, IsTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  const std::vector<int> all = ParseCpuList(AllowedCpus());
  EXPECT_EQ(static_cast<int>(all.size()), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(all.back(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_THAT(ParseCpuList(AllowedCpus()), ElementsAre(all.back()));
  sched_setaffinity(0, sizeof(before), &before);
}

TEST(ThreadsOfTest, SharedProcessorsAreDivided) {
  EXPECT_EQ(ThreadsOf({"0-7"}, 0, {}), 8);
  EXPECT_EQ(ThreadsOf({"0-7", "0-7"}, 1, {}), 4);
  EXPECT_EQ(ThreadsOf({"0-7", "0-7", "0-7"}, 0, {}), 2);
  EXPECT_EQ(ThreadsOf({"0-8", "0-8", "0-8"}, 2, {}), 3);
  EXPECT_EQ(ThreadsOf({"0", "0", "0"}, 2, {}), 1);
}

TEST(ThreadsOfTest, ProcessorsOfOnesOwnAreNot) {
  EXPECT_EQ(ThreadsOf({"0-3", "4-7"}, 0, {}), 4);
  EXPECT_EQ(ThreadsOf({"0-3", "4-7"}, 1, {}), 4);
  // 0 and 1 alone, 2 and 3 shared.
  EXPECT_EQ(ThreadsOf({"0-3", "2-5"}, 0, {}), 3);
}

TEST(ThreadsOfTest, TheCgroupsLimitIsForAllOfThem) {
  EXPECT_EQ(ThreadsOf({"0-15"}, 0, 4.0), 4);
  EXPECT_EQ(ThreadsOf({"0-15", "0-15"}, 0, 4.0), 2);
  EXPECT_EQ(ThreadsOf({"0-15", "0-15"}, 0, 0.5), 1);
  EXPECT_EQ(ThreadsOf({"0-1", "0-1"}, 0, 64.0), 1);
}

TEST(ThreadsOfTest, UnknownIsOne) { EXPECT_EQ(ThreadsOf({"", ""}, 0, {}), 1); }

// A made-up /proc and /sys.
class CgroupTest : public testing::Test {
 protected:
  CgroupTest() {
    std::string name = testing::TempDir() + "/cgroup.XXXXXX";
    root_ = mkdtemp(name.data());
    for (const char* folder :
         {"/proc", "/proc/self", "/sys", "/sys/fs", "/sys/fs/cgroup",
          "/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b"}) {
      mkdir((root_ + folder).c_str(), 0700);
    }
    Write("/proc/self/cgroup", "1:name=systemd:/other\n0::/a/b\n");
    Write("/proc/self/mountinfo",
          "22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw\n"
          "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n");
  }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ + path) << text;
  }
  std::string root_;
};

TEST_F(CgroupTest, TheLeastOfAllLevels) {
  EXPECT_EQ(CgroupCpus(root_), std::nullopt);
  Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(CgroupCpus(root_), std::nullopt);
  Write("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(CgroupCpus(root_), 1.5);
  Write("/sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(CgroupCpus(root_), 1.5);
  Write("/sys/fs/cgroup/cpu.max", "50000 100000\n");  // as in a container
  EXPECT_EQ(CgroupCpus(root_), 0.5);
}

TEST_F(CgroupTest, NoneWithoutVersion2) {
  Write("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  Write("/proc/self/cgroup", "1:cpu:/a/b\n");
  EXPECT_EQ(CgroupCpus(root_), std::nullopt);
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/proc/self/mountinfo", "");
  EXPECT_EQ(CgroupCpus(root_), std::nullopt);
}

}  // namespace
}  // namespace tessera
