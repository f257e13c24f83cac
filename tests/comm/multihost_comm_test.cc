// The hierarchical communicator, whose ranks are told that they are on several
// hosts: every collective, at sizes around the world size and the pieces', in
// several placements, to the bit.
#include <signal.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/comm/collective_checks.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

using Hosts = std::vector<int>;  // by rank

RankPoolOptions OnHosts(const Hosts& hosts) {
  RankPoolOptions options;
  options.world_size = static_cast<int>(hosts.size());
  options.backend = "auto";
  options.hosts = hosts;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

void Check(RankPool& pool, absl::string_view function,
           const std::vector<at::ScalarType>& of,
           const std::vector<int64_t>& sizes,
           const std::vector<std::string>& variants) {
  for (at::ScalarType dtype : of) {
    for (int64_t numel : sizes) {
      for (const std::string& variant : variants) {
        const std::string args =
            absl::StrCat(static_cast<int>(dtype), " ", numel, " ", variant);
        EXPECT_THAT(pool.Run(function, args), Each(IsOkAndHolds("ok")))
            << c10::toString(dtype) << " " << numel << " " << variant;
      }
    }
  }
}

TESSERA_RANK_FUNCTION(BackendOfHosts) {
  return std::string(world.communicator()->backend());
}

// In counted memory, and in ours, which the others do not map, on some ranks.
TESSERA_RANK_FUNCTION(SumsInCountedMemory) {
  const int w = world.world_size();
  const int64_t numel = 100003;
  std::vector<int> ranks(w);
  std::iota(ranks.begin(), ranks.end(), 0);
  const at::Tensor own = SumInOrder({world.rank()}, 0, w * numel, at::kFloat);
  const at::Tensor sum = SumInOrder(ranks, 0, w * numel, at::kFloat);
  for (int staged_rank = -1; staged_rank < w; ++staged_rank) {
    TESSERA_ASSIGN_OR_RETURN(
        const CountedBuffer counted,
        AllocateCounted(w * numel * 4, MemoryKind::kGradients));
    at::Tensor whole = torch::empty({w * numel}, at::kFloat);
    if (world.rank() != staged_rank) {
      whole = torch::from_blob(counted.data(), {w * numel}, at::kFloat);
    }
    whole.copy_(own);
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AllReduceSum(whole, {"sum"}).Wait());
    TESSERA_RETURN_IF_ERROR(ExpectBits(whole, sum, "sum"));
  }
  return "ok";
}

// Many collectives of many sizes, with nobody waiting between them.
TESSERA_RANK_FUNCTION(ManySizes) {
  const int w = world.world_size();
  std::vector<at::Tensor> sums;
  std::vector<CommFuture> futures;
  for (int i = 0; i < 60; ++i) {
    sums.push_back(torch::full({1 + i * i * 31}, i + world.rank(), at::kLong));
    futures.push_back(world.communicator()->AllReduceSum(sums.back(), {"sum"}));
    futures.push_back(
        world.communicator()->Broadcast(sums.back(), i % w, {"same"}));
  }
  for (const CommFuture& future : futures) {
    TESSERA_RETURN_IF_ERROR(future.Wait());
  }
  for (int i = 0; i < 60; ++i) {
    if (!sums[i].eq(w * i + w * (w - 1) / 2).all().item<bool>()) {
      return absl::InternalError(absl::StrCat("sum ", i));
    }
  }
  return "ok";
}

class PlacementTest : public testing::TestWithParam<Hosts> {};

// Contributions, partial sums, the ways back of sums, and what is read through
// shared memory, where it lies and staged.
TEST_P(PlacementTest, EveryCollectiveHasTheBitsOfAPlainLoop) {
  const std::vector<at::ScalarType> all = {
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
      at::kInt,   at::kShort,  at::kChar, at::kByte,     at::kBool};
  RankPool pool(OnHosts(GetParam()));
  EXPECT_THAT(pool.Run("BackendOfHosts", ""),
              Each(IsOkAndHolds("hierarchical")));
  const auto w = static_cast<int64_t>(GetParam().size());
  const std::vector<int64_t> small = {1, w - 1, w + 1, 997};
  const std::vector<int64_t> large = {50021, 250007};  // several windows
  Check(pool, "CheckReduceScatter", all, small, {"apart"});
  Check(pool, "CheckReduceScatter", {at::kFloat, at::kBFloat16}, large,
        {"in_place"});
  Check(pool, "CheckAllReduce", all, small, {"-"});
  Check(pool, "CheckAllReduce", {at::kFloat, at::kHalf}, large, {"-"});
  Check(pool, "CheckAllGather", {at::kFloat}, small, {"apart", "in_place"});
  Check(pool, "CheckAllGather", {at::kByte}, large, {"apart", "in_place"});
  Check(pool, "CheckBroadcast", {at::kByte}, small, {"-"});
  Check(pool, "CheckBroadcast", {at::kDouble}, large, {"-"});
  Check(pool, "CheckAllToAll", {at::kFloat}, small, {"-"});
  Check(pool, "CheckSendReceive", {at::kByte}, large, {"-"});
  for (const char* name : {"GatherTexts", "SumsInCountedMemory", "ManySizes"}) {
    EXPECT_THAT(pool.Run(name, ""), Each(IsOkAndHolds("ok"))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Hosts, PlacementTest,
    testing::Values(Hosts{0, 0, 1}, Hosts{0, 1, 1}, Hosts{0, 0, 1, 1},
                    Hosts{0, 1, 0, 1}, Hosts{0, 0, 0, 1}, Hosts{0, 0, 0, 1, 1},
                    Hosts{0, 0, 1, 1, 2}, Hosts{0, 1, 1, 0, 0}),
    [](const testing::TestParamInfo<Hosts>& info) {
      return absl::StrCat("On", absl::StrJoin(info.param, ""));
    });

// ---- what goes wrong ----

// The last rank dies before the collective that args name.
TESSERA_RANK_FUNCTION(DiesBefore) {
  Communicator& comm = *world.communicator();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("all here"));
  if (world.rank() == world.world_size() - 1) raise(SIGKILL);
  const absl::Time begin = absl::Now();
  at::Tensor t = torch::ones({world.world_size() * 100000});
  absl::Status status;
  if (args == "agreement") {
    status = comm.Barrier("agreement of all");
  } else if (args == "gather") {
    status = comm.AllGather(t.narrow(0, world.rank() * 100000, 100000), t,
                            {"gather of a"})
                 .Wait();
  } else {
    status = comm.AllReduceSum(t, {"reduce of a"}).Wait();
  }
  const absl::Duration took = absl::Now() - begin;
  if (took < absl::Seconds(2)) return status;
  return absl::InternalError(absl::StrCat("after ", absl::FormatDuration(took),
                                          ": ", std::string(status.message())));
}

TEST(FailureTest, ADeadRankOfAHostEndsTheOthersOfAll) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 0, 1}}) {
    for (const char* before : {"agreement", "gather", "reduce"}) {
      RankPool pool(OnHosts(hosts));
      RankPool::Answers answers = pool.Run("DiesBefore", before);
      answers.pop_back();
      EXPECT_THAT(answers,
                  Each(StatusIs(absl::StatusCode::kUnavailable,
                                HasSubstr(absl::StrCat(
                                    "rank ", hosts.size() - 1, " has ended")))))
          << before;
    }
  }
}

// Rank 3 is in another collective than the others.
TESSERA_RANK_FUNCTION(InAnother) {
  at::Tensor t = torch::ones({1000});
  if (world.rank() == 3) {
    return world.communicator()->Broadcast(t, 0, {"broadcast of b"}).Wait();
  }
  return world.communicator()->AllReduceSum(t, {"reduce of a"}).Wait();
}

TEST(FailureTest, RanksInDifferentCollectivesAreTold) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 0, 0, 1}}) {
    RankPool pool(OnHosts(hosts));
    for (const auto& answer : pool.Run("InAnother", "")) {
      EXPECT_THAT(
          answer.status().message(),
          AllOf(HasSubstr("different collectives"), HasSubstr("reduce of a"),
                HasSubstr("broadcast of b"), HasSubstr("rank 3")));
    }
  }
}

// Only what it is for differs.
TESSERA_RANK_FUNCTION(OfAnotherUnit) {
  at::Tensor t = torch::ones({1000});
  return world.communicator()
      ->AllReduceSum(t, {world.rank() == 0 ? "sum of a" : "sum of b"})
      .Wait()
      .ToString();
}

TEST(FailureTest, UnitsOfOneSizeOnTwoHostsAreTold) {
  RankPool pool(OnHosts({0, 1}));
  EXPECT_THAT(
      pool.Run("OfAnotherUnit", ""),
      Each(IsOkAndHolds(AllOf(HasSubstr("different collectives"),
                              HasSubstr("sum of a"), HasSubstr("sum of b")))));
}

// Of one size, and rank 1 exchanges no messages.
TESSERA_RANK_FUNCTION(InAnotherDtype) {
  at::Tensor t =
      torch::ones({1000}, world.rank() == 1 ? torch::kInt : torch::kFloat);
  return world.communicator()
      ->Broadcast(t, 0, {"broadcast of b"})
      .Wait()
      .ToString();
}

TEST(FailureTest, RanksOfAHostWithOtherDtypesAreTold) {
  RankPool pool(OnHosts({0, 0, 1}));
  EXPECT_THAT(
      pool.Run("InAnotherDtype", ""),
      Each(IsOkAndHolds(AllOf(HasSubstr("different collectives"),
                              HasSubstr("int32"), HasSubstr("float32")))));
}

}  // namespace
}  // namespace tessera
