// Memory that the ranks of a host share, where the system or another rank does
// not give what is expected.
#include "comm/shared_memory.h"

#include <sys/resource.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Of the mappings of our memfds: those that a core dump would hold.
TESSERA_RANK_FUNCTION(DumpedMemory) {
  TESSERA_ASSIGN_OR_RETURN(const auto shared, world.communicator()->ShareMemory(
                                                  1 << 20, {"shared"}));
  std::ifstream smaps("/proc/self/smaps");
  std::string line, name, dumped;
  int mappings = 0;
  while (std::getline(smaps, line)) {
    if (absl::StrContains(line, "/memfd:tessera-")) name = line;
    if (!absl::StartsWith(line, "VmFlags:")) continue;
    if (!name.empty()) {
      ++mappings;
      if (!absl::StrContains(line + " ", " dd ")) dumped += name + "\n";
    }
    name = "";
  }
  return absl::StrCat(mappings, " mappings, dumped: ", dumped);
}

// A head and a heap of each rank; the shared memory, read and written.
TEST(SharedMemoryTest, CoreDumpsLeaveItOut) {
  EXPECT_THAT(RankPool::Get(2)->Run("DumpedMemory", ""),
              Each(IsOkAndHolds("6 mappings, dumped: ")));
}

int MappingsOfHeaps() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) {
    count += absl::StrContains(line, "/memfd:tessera-heap");
  }
  return count;
}

// Of groups of all ranks, of pairs, and of a group split off a group; then of
// none of these, and of one that comes after them.
TESSERA_RANK_FUNCTION(SplitsAndHeaps) {
  Communicator& all = *world.communicator();
  std::string counts = absl::StrCat(MappingsOfHeaps());
  std::vector<std::shared_ptr<Communicator>> groups;
  for (const int members : {world.world_size(), 2}) {
    TESSERA_ASSIGN_OR_RETURN(
        groups.emplace_back(),
        all.Split(world.rank() / members, {absl::StrCat("of ", members)}));
  }
  TESSERA_ASSIGN_OR_RETURN(groups.emplace_back(),
                           groups[0]->Split(world.rank() % 2, {"of these"}));
  absl::StrAppend(&counts, " ", MappingsOfHeaps());
  for (const auto& group : groups) {
    TESSERA_RETURN_IF_ERROR(group->Barrier("in a group"));
  }
  groups.clear();
  TESSERA_ASSIGN_OR_RETURN(groups.emplace_back(), all.Split(0, {"after"}));
  TESSERA_RETURN_IF_ERROR(groups[0]->Barrier("in a group"));
  absl::StrAppend(&counts, " ", MappingsOfHeaps());
  return counts;
}

// Each is as long as the machine's memory.
TEST(SharedMemoryTest, GroupsShareTheMappingsOfHeaps) {
  EXPECT_THAT(RankPool::Get(4)->Run("SplitsAndHeaps", ""),
              Each(IsOkAndHolds("4 4 4")));
}

TESSERA_RANK_FUNCTION(SharesOtherSizes) {
  const absl::Status status =
      world.communicator()
          ->ShareMemory(4096 << world.rank(), {"working copy"})
          .status();
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("after"));
  return std::string(status.message());
}

TEST(SharedMemoryTest, RanksThatAskForOtherSizesAreTold) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("SharesOtherSizes", ""),
      Each(IsOkAndHolds(AllOf(HasSubstr("working copy"), HasSubstr("rank 1"),
                              HasSubstr("4096"), HasSubstr("8192")))));
}

TESSERA_RANK_FUNCTION(Backend) {
  return std::string(world.communicator()->backend());
}

// Started by exec, so that the ranks have the limit of this process.
TEST(SharedMemoryTest, ALimitOfFilesTakesGloo) {
  RankPoolOptions options;
  options.backend = "auto";
  options.threads_per_rank = 2;
  RankPool pool(options);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit = {1 << 30, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const RankPool::Answers answers = pool.Run("Backend", "");
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(answers, Each(IsOkAndHolds("gloo")));
}

}  // namespace
}  // namespace tessera
