// Groups that are split off others: their collectives, to the bit, among those
// of the group of all ranks, and what is left of them. What goes wrong is in
// split_failure_test.cc.
#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/group/group_communicator.h"
#include "comm/mesh/mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/comm/collective_checks.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using CommPtr = std::shared_ptr<Communicator>;

// "0 1 1": numbers by rank.
std::vector<int> Numbers(absl::string_view text) {
  std::vector<int> numbers;
  for (absl::string_view number : absl::StrSplit(text, ' ')) {
    TORCH_CHECK(absl::SimpleAtoi(number, &numbers.emplace_back()));
  }
  return numbers;
}

// A group, and which ranks of the world are in it.
struct Group {
  CommPtr comm;
  std::vector<int> ranks;
};

Group WholeWorld(const World& world) {
  Group group{world.communicator(), {}};
  for (int r = 0; r < world.world_size(); ++r) group.ranks.push_back(r);
  return group;
}

// This rank's subgroup, by the colors of the ranks of `group`.
absl::StatusOr<Group> SubgroupOf(const Group& group,
                                 const std::vector<int>& colors,
                                 const char* name) {
  const int own = group.comm->rank();
  Group subgroup;
  TESSERA_ASSIGN_OR_RETURN(subgroup.comm,
                           group.comm->Split(colors[own], {name}));
  for (size_t r = 0; r < group.ranks.size(); ++r) {
    if (colors[r] == colors[own]) subgroup.ranks.push_back(group.ranks[r]);
  }
  if (subgroup.comm->world_size() != static_cast<int>(subgroup.ranks.size()) ||
      subgroup.ranks[subgroup.comm->rank()] != group.ranks[own]) {
    return absl::InternalError("another size or rank than the colors say");
  }
  return subgroup;
}

// ---- collectives, and what they must give ----

// One that is under way.
struct Started {
  CommFuture future;
  at::Tensor got, want;
  std::string what;

  absl::Status Check() const {
    TESSERA_RETURN_IF_ERROR(future.Wait());
    return ExpectBits(got, want, what);
  }
};

// `kind` 0 to 3: all-gather, reduce-scatter, all-reduce, broadcast. `salt`
// makes values of its own.
Started Start(const Group& group, int kind, int64_t numel, int64_t salt) {
  const int w = group.comm->world_size();
  const int rank = group.comm->rank();
  const int own = group.ranks[rank];
  auto values = [&](int r, int64_t n) {
    return SumInOrder({r}, salt, n, at::kFloat);
  };
  Started started;
  started.what = absl::StrCat("kind ", kind, " of ", numel, " in group of ",
                              absl::StrJoin(group.ranks, ","));
  switch (kind) {
    case 0: {
      started.got = torch::zeros({w * numel});
      std::vector<at::Tensor> all;
      for (int r : group.ranks) all.push_back(values(r, numel));
      started.want = torch::cat(all);
      started.future =
          group.comm->AllGather(values(own, numel), started.got, {"gather"});
      break;
    }
    case 1:
      started.got = torch::zeros({numel});
      started.want =
          SumInOrder(group.ranks, salt + rank * numel, numel, at::kFloat);
      started.future = group.comm->ReduceScatterSum(values(own, w * numel),
                                                    started.got, {"scatter"});
      break;
    case 2:
      started.got = values(own, numel);
      started.want = SumInOrder(group.ranks, salt, numel, at::kFloat);
      started.future = group.comm->AllReduceSum(started.got, {"reduce"});
      break;
    default: {
      const int root = static_cast<int>(salt % w);
      started.got = values(own, numel);
      started.want = values(group.ranks[root], numel);
      started.future = group.comm->Broadcast(started.got, root, {"broadcast"});
    }
  }
  return started;
}

absl::Status CheckStrings(const Group& group) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      group.comm->AllGatherStrings(
          absl::StrCat("of ", group.ranks[group.comm->rank()]), {"texts"}));
  for (size_t r = 0; r < group.ranks.size(); ++r) {
    if (texts.at(r) != absl::StrCat("of ", group.ranks[r])) {
      return absl::InternalError(absl::StrCat("text ", r, " is ", texts[r]));
    }
  }
  return absl::OkStatus();
}

// All ranks draw the same kinds, sizes and groups, and wait at the end.
absl::Status CheckMixed(const std::vector<Group>& groups, int rounds) {
  std::mt19937 random(17);
  auto up_to = [&](int n) { return static_cast<int>(random() % n); };
  constexpr int64_t kNumel[] = {1, 3, 64, 997, 20011};
  std::vector<Started> all;
  for (int i = 0; i < rounds; ++i) {
    const int group = up_to(static_cast<int>(groups.size()));
    const int kind = up_to(4);
    all.push_back(Start(groups[group], kind, kNumel[up_to(5)], i));
  }
  for (const Group& group : groups) {
    TESSERA_RETURN_IF_ERROR(CheckStrings(group));
  }
  for (const Started& started : all) {
    TESSERA_RETURN_IF_ERROR(started.Check());
  }
  return absl::OkStatus();
}

// ---- tests ----

// Args: the colors. Collectives of all subgroups at once and of the whole among
// them, none waited for before all are called.
TESSERA_RANK_FUNCTION(MixedCollectives) {
  const Group whole = WholeWorld(world);
  TESSERA_ASSIGN_OR_RETURN(const Group subgroup,
                           SubgroupOf(whole, Numbers(args), "subgroups"));
  TESSERA_RETURN_IF_ERROR(CheckMixed({whole, subgroup}, 150));
  return absl::StrCat(subgroup.comm->backend(), " ", subgroup.comm->rank(), "/",
                      subgroup.comm->world_size());
}

// The backend of ranks `ranks`, where the whole has the pool's.
std::string Backend(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return "self";
  if (DefaultBackend() != "hierarchical") return DefaultBackend();
  int hosts = 1;
  for (size_t i = 1; i < ranks.size(); ++i) {
    hosts += DefaultMemoryGroup(ranks[i]) != DefaultMemoryGroup(ranks[i - 1]);
  }
  if (hosts == 1) return "shm";
  return hosts == static_cast<int>(ranks.size()) ? "gloo" : "hierarchical";
}

class ColorsTest : public testing::TestWithParam<const char*> {};

TEST_P(ColorsTest, EveryCollectiveOfSubgroupsAndWholeHasTheBitsOfAPlainLoop) {
  const std::vector<int> colors = Numbers(GetParam());
  RankPool* const pool = RankPool::Get(static_cast<int>(colors.size()));
  const RankPool::Answers answers = pool->Run("MixedCollectives", GetParam());
  for (size_t r = 0; r < colors.size(); ++r) {
    std::vector<int> ranks;
    for (size_t s = 0; s < colors.size(); ++s) {
      if (colors[s] == colors[r]) ranks.push_back(static_cast<int>(s));
    }
    const auto own = std::find(ranks.begin(), ranks.end(), static_cast<int>(r));
    EXPECT_THAT(answers[r], IsOkAndHolds(absl::StrCat(Backend(ranks), " ",
                                                      own - ranks.begin(), "/",
                                                      ranks.size())));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ColorsTest,
                         testing::Values("0 0 1 1", "0 1 0 1", "1 0 0 1",
                                         "0 7 0 0", "-3 5 9 5", "0 0 0 0",
                                         "3 2 1 0", "0 0 1", "1 0 0", "4 5 4"),
                         [](const testing::TestParamInfo<const char*>& info) {
                           return absl::StrCat(
                               "Colors",
                               absl::StrReplaceAll(
                                   info.param, {{" ", "_"}, {"-", "Minus"}}));
                         });

// What this process has.
struct Holdings {
  int descriptors = 0, threads = 0, comm_threads = 0, shared_memories = 0;

  bool operator<=(const Holdings& other) const {
    return descriptors <= other.descriptors && threads <= other.threads &&
           shared_memories <= other.shared_memories;
  }
  std::string ToText() const {
    return absl::StrCat("descriptors ", descriptors, ", threads ", threads,
                        ", shared memories ", shared_memories);
  }
};

std::vector<std::string> Names(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const dir = opendir(folder.c_str());
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') names.push_back(entry->d_name);
  }
  closedir(dir);
  return names;
}

Holdings Held() {
  Holdings held;
  held.descriptors = static_cast<int>(Names("/proc/self/fd").size());
  std::string line;
  for (const std::string& thread : Names("/proc/self/task")) {
    ++held.threads;
    std::ifstream in(absl::StrCat("/proc/self/task/", thread, "/comm"));
    held.comm_threads += std::getline(in, line) && line == "tessera-comm";
  }
  std::ifstream maps("/proc/self/maps");
  while (std::getline(maps, line)) {
    held.shared_memories += absl::StrContains(line, "tessera-head");
  }
  return held;
}

// A mesh of two axes: a rank is in two subgroups that overlap others.
TESSERA_RANK_FUNCTION(TwoAxes) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto mesh, Mesh::Create(world.communicator(),
                                    {{"dp_replicate", 2}, {"dp_shard", 2}}));
  std::vector<Group> groups = {WholeWorld(world)};
  for (const char* axis : {"dp_shard", "dp_replicate"}) {
    TESSERA_RETURN_IF_ERROR(mesh->MakeGroup(axis));
    groups.push_back({mesh->group(axis), mesh->ranks(axis)});
  }
  TESSERA_RETURN_IF_ERROR(CheckMixed(groups, 300));
  return absl::StrCat(Held().comm_threads);
}

TEST(SplitTest, OneThreadIssuesAllInTheOrderOfTheCalls) {
  for (int round = 0; round < 3; ++round) {
    EXPECT_THAT(RankPool::Get(4)->Run("TwoAxes", ""), Each(IsOkAndHolds("1")));
  }
}

TESSERA_RANK_FUNCTION(SplitOfSplit) {
  const Group whole = WholeWorld(world);
  TESSERA_ASSIGN_OR_RETURN(Group outer,
                           SubgroupOf(whole, {0, 0, 0, 1}, "outer"));
  const std::vector<int> colors =
      world.rank() == 3 ? std::vector<int>{5} : std::vector<int>{0, 1, 0};
  TESSERA_ASSIGN_OR_RETURN(const Group inner,
                           SubgroupOf(outer, colors, "inner"));
  TESSERA_RETURN_IF_ERROR(CheckMixed({whole, outer, inner}, 100));
  outer.comm = nullptr;  // the inner one lives on
  TESSERA_RETURN_IF_ERROR(CheckMixed({whole, inner}, 50));
  return absl::StrJoin(inner.ranks, ",");
}

TEST(SplitTest, ASubgroupIsSplitAndOutlivesItsWhole) {
  EXPECT_THAT(RankPool::Get(4)->Run("SplitOfSplit", ""),
              ElementsAre(IsOkAndHolds("0,2"), IsOkAndHolds("1"),
                          IsOkAndHolds("0,2"), IsOkAndHolds("3")));
}

TESSERA_RANK_FUNCTION(Records) {
  const Group whole = WholeWorld(world);
  TESSERA_ASSIGN_OR_RETURN(const Group subgroup,
                           SubgroupOf(whole, {0, 1, 1}, "nodes"));
  at::Tensor t = torch::ones({4});
  TESSERA_RETURN_IF_ERROR(subgroup.comm->AllReduceSum(t, {"unit a"}).Wait());
  auto* const comm = dynamic_cast<GroupCommunicator*>(subgroup.comm.get());
  const std::vector<CollectiveRecord> records = comm->recorder().Snapshot();
  return absl::StrCat(records.size(), " ", records.back().what, "|",
                      records.back().group, "\n", comm->recorder().ToText(),
                      subgroup.comm->Report());
}

TEST(SplitTest, RecordsAndReportsTellTheGroup) {
  RankPool pool({.world_size = 3});
  for (const auto& answer : pool.Run("Records", "")) {
    EXPECT_THAT(
        answer,
        IsOkAndHolds(AllOf(
            HasSubstr("1 unit a|nodes 1."),
            HasSubstr("16 bytes of float32  unit a of group nodes 1."),
            HasSubstr(" of group nodes 1."), HasSubstr("tests/comm/split"))));
  }
}

// ---- the end of subgroups ----

// Splits `count` times, uses all subgroups, and ends them in an order of its
// own.
absl::Status SplitAndEnd(const World& world, int count) {
  const Group whole = WholeWorld(world);
  std::vector<Group> subgroups;
  for (int i = 0; i < count; ++i) {
    TESSERA_ASSIGN_OR_RETURN(
        Group subgroup,
        SubgroupOf(
            subgroups.size() % 4 == 3 ? subgroups.back() : whole,
            i % 4 == 3 ? std::vector<int>{1, 1} : std::vector<int>{0, 0, 1, 1},
            "some"));
    subgroups.push_back(std::move(subgroup));
  }
  for (const Group& subgroup : subgroups) {
    TESSERA_RETURN_IF_ERROR(CheckMixed({whole, subgroup}, 6));
  }
  // Still queued when the owner goes, on some.
  std::vector<CommFuture> last;
  for (const Group& subgroup : subgroups)
    last.push_back(Start(subgroup, 2, 100, 0).future);
  std::mt19937 random(world.rank());
  std::shuffle(subgroups.begin(), subgroups.end(), random);
  if (world.rank() % 2 == 0) subgroups.clear();
  for (const CommFuture& future : last) TESSERA_RETURN_IF_ERROR(future.Wait());
  while (!subgroups.empty()) subgroups.pop_back();
  return world.communicator()->Barrier("after all");
}

TESSERA_RANK_FUNCTION(ManySubgroups) {
  TESSERA_RETURN_IF_ERROR(SplitAndEnd(world, 4));
  const Holdings before = Held();
  TESSERA_RETURN_IF_ERROR(SplitAndEnd(world, 12));
  for (int i = 0; i < 100; ++i) {  // threads take a moment to go
    if (Held() <= before) return "ok";
    absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::StrCat("before: ", before.ToText(), "; now: ", Held().ToText());
}

TEST(SplitTest, SubgroupsEndInAnyOrderAndLeaveNothing) {
  EXPECT_THAT(RankPool::Get(4)->Run("ManySubgroups", ""),
              Each(IsOkAndHolds("ok")));
}

}  // namespace
}  // namespace tessera
