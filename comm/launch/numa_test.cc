#include "comm/launch/numa.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <string>
#include <thread>

#include "base/status_matchers.h"
#include "comm/launch/cpus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(NumaNodesTest, ThoseWithProcessors) {
  std::string root = testing::TempDir() + "/numa.XXXXXX";
  root = mkdtemp(root.data());
  for (const char* folder : {"", "/devices", "/devices/system"}) {
    mkdir((root + "/sys" + folder).c_str(), 0700);
  }
  const std::string nodes = root + "/sys/devices/system/node";
  EXPECT_THAT(NumaNodes(root), IsEmpty());
  mkdir(nodes.c_str(), 0700);
  std::ofstream(nodes + "/online") << "0-1,3\n";
  const auto add = [&](const std::string& node, const std::string& cpus) {
    mkdir((nodes + node).c_str(), 0700);
    std::ofstream(nodes + node + "/cpulist") << cpus << "\n";
  };
  add("/node0", "0-3,8-11");
  add("/node1", "");  // memory that is attached by CXL, say
  add("/node2", "12");
  add("/node3", "4-7");
  EXPECT_THAT(NumaNodes(root), ElementsAre("0-3,8-11", "4-7"));
}

TEST(NumaNodesTest, ThisHostsHoldWhatIsAllowed) {
  std::vector<int> all;
  for (const std::string& node : NumaNodes()) {
    for (const int cpu : ParseCpuList(node)) all.push_back(cpu);
  }
  if (all.empty()) GTEST_SKIP() << "this kernel tells of no nodes";
  for (const int cpu : ParseCpuList(AllowedCpus())) {
    EXPECT_THAT(all, testing::Contains(cpu));
  }
}

TEST(BindToNodesTest, BlocksOfRanksOrOfNodes) {
  const std::vector<std::string> two = {"0-1", "2-3"};
  EXPECT_THAT(BindToNodes(two, {"0-3"}), ElementsAre("0,1,2,3"));
  EXPECT_THAT(BindToNodes(two, {"0-3", "0-3"}), ElementsAre("0,1", "2,3"));
  EXPECT_THAT(BindToNodes(two, {"0-3", "0-3", "0-3"}),
              ElementsAre("0,1", "0,1", "2,3"));
  EXPECT_THAT(BindToNodes({"0", "1", "2", "3", "4"}, {"0-4", "0-4"}),
              ElementsAre("0,1", "2,3,4"));
}

TEST(BindToNodesTest, OnlyWhatIsAllowed) {
  EXPECT_THAT(BindToNodes({"0-3", "4-7"}, {"2-5", "2-5"}),
              ElementsAre("2,3", "4,5"));
  // The second of three nodes has nothing for this job.
  EXPECT_THAT(BindToNodes({"0-3", "4-7", "8-11"}, {"0,8-9", "0,8-9"}),
              ElementsAre("0", "8,9"));
}

TEST(BindToNodesTest, NothingToBind) {
  const std::vector<std::string> same = {"0-3", "0-3"};
  EXPECT_EQ(BindToNodes({"0-3"}, same), same);
  EXPECT_EQ(BindToNodes({}, same), same);
  EXPECT_EQ(BindToNodes({"0-3", "4-7"}, same), same);
  const std::vector<std::string> bound = {"0-1", "2-3"};
  EXPECT_EQ(BindToNodes({"0,2", "1,3"}, bound), bound);
  EXPECT_THAT(BindToNodes({"0-1", "2-3"}, {"", ""}), ElementsAre("", ""));
}

TEST(RunOnTest, ThreadsThatFollowToo) {
  std::thread([] {
    const std::vector<int> all = ParseCpuList(AllowedCpus());
    TESSERA_EXPECT_OK(RunOn(std::to_string(all.back())));
    std::thread([&] {
      EXPECT_THAT(ParseCpuList(AllowedCpus()), ElementsAre(all.back()));
    }).join();
    EXPECT_THAT(RunOn("").ToString(),
                testing::HasSubstr("cannot run on the processors "));
    EXPECT_THAT(ParseCpuList(AllowedCpus()), ElementsAre(all.back()));
  }).join();
}

}  // namespace
}  // namespace tessera
