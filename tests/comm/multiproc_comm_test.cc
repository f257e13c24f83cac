// The conformance of a communicator of 2, 3 and 4 ranks: every collective, at
// sizes around the world size, to the bit.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/connect/sockets.h"
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

class CollectiveTest : public testing::TestWithParam<int> {
 protected:
  int w() const { return GetParam(); }
  std::vector<int64_t> Sizes() const {
    return {0, 1, w() - 1, w(), w() + 1, 9973, 1 << 20};
  }
  void Check(absl::string_view function, const std::vector<at::ScalarType>& of,
             const std::vector<std::string>& variants) {
    for (at::ScalarType dtype : of) {
      for (int64_t numel : Sizes()) {
        for (const std::string& variant : variants) {
          const std::string args =
              absl::StrCat(static_cast<int>(dtype), " ", numel, " ", variant);
          EXPECT_THAT(RankPool::Get(w())->Run(function, args),
                      Each(IsOkAndHolds("ok")))
              << c10::toString(dtype) << " " << numel << " " << variant;
        }
      }
    }
  }
};

TEST_P(CollectiveTest, AllGather) {
  Check("CheckAllGather", {at::kFloat, at::kDouble, at::kLong, at::kByte},
        {"apart", "in_place"});
}

TEST_P(CollectiveTest, ReduceScatterInRankOrder) {
  Check("CheckReduceScatter", {at::kFloat, at::kDouble, at::kLong},
        {"apart", "in_place"});
}

TEST_P(CollectiveTest, AllReduceInRankOrder) {
  Check("CheckAllReduce", {at::kFloat, at::kDouble, at::kBFloat16, at::kLong},
        {"-"});
}

TEST_P(CollectiveTest, Broadcast) {
  Check("CheckBroadcast", {at::kFloat, at::kDouble, at::kLong, at::kByte},
        {"-"});
}

TEST_P(CollectiveTest, AllToAll) {
  Check("CheckAllToAll", {at::kFloat, at::kByte}, {"-"});
}

TEST_P(CollectiveTest, SendReceive) {
  Check("CheckSendReceive", {at::kFloat, at::kByte}, {"-"});
}

TEST(ValuesTest, ShowTheOrderOfTheirSum) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor sum = SumInOrder({0, 1, 2}, 0, 9973, dtype);
    EXPECT_FALSE(SameBits(sum, SumInOrder({2, 1, 0}, 0, 9973, dtype)));
    EXPECT_FALSE(SameBits(sum, SumInOrder({1, 2, 0}, 0, 9973, dtype)));
  }
}

// Several pieces, the last one short, for every rank.
TESSERA_RANK_FUNCTION(ReduceScatterInPieces) {
  MemoryLedger::Host().ResetPeak();
  const int64_t numel = (int64_t{3} << 20) + 13;
  const int w = world.world_size();
  at::Tensor whole = torch::full({w * numel}, world.rank() + 0.5, at::kDouble);
  whole += torch::arange(w * numel, at::kDouble).remainder(1021);
  at::Tensor shard = torch::empty({numel}, at::kDouble);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->ReduceScatterSum(whole, shard, {"big"}).Wait());
  const at::Tensor want = torch::arange(world.rank() * numel,
                                        (world.rank() + 1) * numel, at::kDouble)
                                  .remainder(1021) *
                              w +
                          w * (w - 1) / 2.0 + 0.5 * w;
  TESSERA_RETURN_IF_ERROR(ExpectBits(shard, want, "shard"));
  const MemoryUse use =
      MemoryLedger::Host().Report()[MemoryKind::kCommunication];
  const bool needs_none = world.communicator()->backend() == "shm";
  if ((use.peak_bytes == 0) != needs_none || use.peak_bytes > 4 << 20) {
    return absl::InternalError(absl::StrCat("peak ", use.peak_bytes));
  }
  return "ok";
}

TEST_P(CollectiveTest, ABigReduceScatterNeedsLittleMemory) {
  EXPECT_THAT(RankPool::Get(w())->Run("ReduceScatterInPieces", ""),
              Each(IsOkAndHolds("ok")));
}

TESSERA_RANK_FUNCTION(ManyInFlight) {
  const int w = world.world_size();
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> wholes;
  std::vector<CommFuture> futures;
  for (int i = 0; i < 200; ++i) {
    sums.push_back(torch::full({i + 1}, i + world.rank(), at::kDouble));
    wholes.push_back(torch::full({w * 3}, world.rank() * 1000 + i, at::kLong));
    futures.push_back(world.communicator()->AllReduceSum(sums.back(), {"sum"}));
    futures.push_back(world.communicator()->AllGather(
        wholes.back().narrow(0, world.rank() * 3, 3), wholes.back(), {"all"}));
  }
  for (const CommFuture& future : futures) {
    TESSERA_RETURN_IF_ERROR(future.Wait());
  }
  for (int i = 0; i < 200; ++i) {
    const double want = w * i + w * (w - 1) / 2.0;
    if (!torch::equal(sums[i], torch::full({i + 1}, want, at::kDouble))) {
      return absl::InternalError(absl::StrCat("sum ", i));
    }
    for (int r = 0; r < w; ++r) {
      if (wholes[i][r * 3 + 2].item<int64_t>() != r * 1000 + i) {
        return absl::InternalError(absl::StrCat("gather ", i));
      }
    }
  }
  return "ok";
}

TEST_P(CollectiveTest, ManyInFlightKeepTheirOrder) {
  EXPECT_THAT(RankPool::Get(w())->Run("ManyInFlight", ""),
              Each(IsOkAndHolds("ok")));
}

TEST_P(CollectiveTest, AllGatherStrings) {
  EXPECT_THAT(RankPool::Get(w())->Run("GatherTexts", ""),
              Each(IsOkAndHolds("ok")));
}

// Args: the ranks that fail.
TESSERA_RANK_FUNCTION(Agree) {
  const std::vector<std::string> failing = absl::StrSplit(args, ' ');
  absl::Status mine;
  for (const std::string& r : failing) {
    if (r == absl::StrCat(world.rank())) {
      mine = absl::DataLossError(absl::StrCat("chunk ", r, " is bad"));
    }
  }
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("before"));
  const absl::Status agreed = world.communicator()->AgreeOk(mine, "load");
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("after"));
  return agreed.ToString();
}

TEST_P(CollectiveTest, AgreeOk) {
  RankPool* const pool = RankPool::Get(w());
  EXPECT_THAT(pool->Run("Agree", ""), Each(IsOkAndHolds("OK")));
  for (int r = 0; r < w(); ++r) {
    EXPECT_THAT(pool->Run("Agree", absl::StrCat(r)),
                Each(IsOkAndHolds(absl::StrCat("DATA_LOSS: [load] rank ", r,
                                               ": chunk ", r, " is bad"))));
  }
  EXPECT_THAT(pool->Run("Agree", absl::StrCat(w() - 1, " ", w() - 2)),
              Each(IsOkAndHolds(HasSubstr(absl::StrCat("rank ", w() - 2)))));
}

// Wrong arguments are this rank's own affair: nothing is sent.
TESSERA_RANK_FUNCTION(WrongArguments) {
  const absl::Status status =
      world.communicator()
          ->AllGather(torch::zeros({3}), torch::zeros({5}), {"gather"})
          .Wait();
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("after"));
  return status.ToString();
}

// Returns the errors of exchanges whose parts have wrong sizes.
TESSERA_RANK_FUNCTION(WrongParts) {
  Communicator& comm = *world.communicator();
  const int w = world.world_size();
  const at::Tensor t = torch::zeros({2 * w}), other = torch::zeros({2 * w});
  std::string text;
  for (const CommFuture& refused :
       {comm.AllToAll(t, t, {"a"}),
        comm.AllToAll(torch::zeros({2 * w + 1}), torch::zeros({2 * w + 1}),
                      {"b"}),
        comm.SendReceive(t, w, other, 0, {"c"}),
        comm.SendReceive(t, 0, other, -2, {"d"}),
        comm.SendReceive(t, 0, torch::zeros({1}), 0, {"e"})}) {
    absl::StrAppend(&text, refused.Wait().ToString(), "\n");
  }
  TESSERA_RETURN_IF_ERROR(comm.Barrier("after"));
  return text;
}

TEST_P(CollectiveTest, RefusesPartsThatCannotBeMoved) {
  EXPECT_THAT(
      RankPool::Get(w())->Run("WrongParts", ""),
      Each(IsOkAndHolds(AllOf(
          HasSubstr("a: what is sent and received overlap"),
          HasSubstr(absl::StrCat("b: what is sent has ", 2 * w() + 1,
                                 " elements, expected a multiple of ", w())),
          HasSubstr(absl::StrCat("c: to is ", w(), ", expected -1 to ")),
          HasSubstr("d: from is -2, expected -1 to "),
          HasSubstr("e: what is sent and received differ in size")))));
}

TEST_P(CollectiveTest, RefusesWrongArgumentsAndStaysUsable) {
  EXPECT_THAT(RankPool::Get(w())->Run("WrongArguments", ""),
              Each(IsOkAndHolds(AllOf(HasSubstr("INVALID_ARGUMENT"),
                                      HasSubstr("whole has 5 elements")))));
}

TESSERA_RANK_FUNCTION(DescribeWorld) {
  return absl::StrCat(world.rank(), "/", world.world_size(), " local ",
                      world.local_rank(), "/", world.local_world_size(), " ",
                      world.communicator()->rank(), "/",
                      world.communicator()->world_size(), " ",
                      std::string(world.communicator()->backend()), " threads ",
                      at::get_num_threads());
}

TEST_P(CollectiveTest, World) {
  const RankPool::Answers answers =
      RankPool::Get(w())->Run("DescribeWorld", "");
  for (int r = 0; r < w(); ++r) {
    EXPECT_THAT(answers[r],
                IsOkAndHolds(absl::StrCat(r, "/", w(), " local ", r, "/", w(),
                                          " ", r, "/", w(), " ",
                                          DefaultBackend(), " threads 1")));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, CollectiveTest, testing::Values(2, 3, 4),
                         [](const testing::TestParamInfo<int>& info) {
                           return absl::StrCat("World", info.param);
                         });

// ---- the pool itself ----

TESSERA_RANK_FUNCTION(Echo) { return absl::StrCat(world.rank(), ":", args); }

TESSERA_RANK_FUNCTION(Exit) {
  if (world.rank() == 1) {
    fprintf(stderr, "about to go\n");
    _exit(7);
  }
  return "here";
}

TESSERA_RANK_FUNCTION(Throw) {
  TORCH_CHECK(world.rank() == 0, "not rank 0");
  return "rank 0";
}

TESSERA_RANK_FUNCTION(Sleep) {
  if (world.rank() == 1) absl::SleepFor(absl::Hours(1));
  return "awake";
}

TEST(RankPoolTest, StringsAreBinarySafe) {
  const std::string bytes =
      absl::StrCat(std::string("a\0b\n", 4), std::string(3 << 20, '\xff'));
  const RankPool::Answers answers = RankPool::Get(2)->Run("Echo", bytes);
  EXPECT_EQ(*answers[0], absl::StrCat("0:", bytes));
  EXPECT_EQ(*answers[1], absl::StrCat("1:", bytes));
}

TEST(RankPoolTest, AWorldOfOne) {
  EXPECT_THAT(RankPool::Get(1)->Run("Echo", "x"), Each(IsOkAndHolds("0:x")));
}

// What comes for any of this process's listening TCP sockets: "taken", or
// nothing. Rank 0's own are for later ranks.
TESSERA_RANK_FUNCTION(KnockAtListeners) {
  std::string answers;
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    sockaddr_in at = {};
    socklen_t length = sizeof(at);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 ||
        listens == 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0 ||
        at.sin_family != AF_INET) {
      continue;
    }
    const int caller = ConnectTo("127.0.0.1", absl::StrCat(ntohs(at.sin_port)));
    absl::StrAppend(&answers, caller >= 0 ? "taken " : "silent ");
    if (caller >= 0) close(caller);
  }
  return world.rank() == 0 ? "" : answers;
}

// Gloo's ends for strangers once all ranks are connected; nothing else of a
// rank but the first listens.
TEST(ListenersTest, NobodyIsTakenOnceAllAreConnected) {
  const auto answers = RankPool::Get(2)->Run("KnockAtListeners", "");
  const bool gloo = EnvString("TESSERA_TEST_BACKEND").value_or("") == "gloo";
  EXPECT_THAT(answers[1], IsOkAndHolds(gloo ? "silent " : ""));
}

TEST(RankPoolTest, RanksAreKeptBetweenRuns) {
  RankPool pool({.world_size = 2});
  EXPECT_THAT(pool.Run("Echo", ""), Each(IsOk()));
  const pid_t pid = pool.pid(1);
  EXPECT_THAT(pool.Run("Throw", ""),
              testing::ElementsAre(
                  IsOkAndHolds("rank 0"),
                  StatusIs(absl::StatusCode::kInternal, "Throw: not rank 0")));
  EXPECT_THAT(pool.Run("NoSuch", ""),
              Each(StatusIs(absl::StatusCode::kNotFound)));
  EXPECT_EQ(pool.pid(1), pid);
}

TEST(RankPoolTest, ADeathIsToldAndTheRanksReplaced) {
  RankPool pool({.world_size = 2});
  EXPECT_THAT(pool.Run("Exit", ""),
              testing::ElementsAre(
                  IsOkAndHolds("here"),
                  StatusIs(absl::StatusCode::kUnavailable,
                           AllOf(HasSubstr("rank 1 ended (exit code 7)"),
                                 HasSubstr("about to go")))));
  EXPECT_EQ(pool.pid(0), 0);
  EXPECT_THAT(pool.Run("Echo", ""), Each(IsOk()));
}

TEST(RankPoolTest, ADeadlineNamesTheRanks) {
  RankPool pool({.world_size = 3});
  EXPECT_THAT(pool.Run("Echo", ""), Each(IsOk()));
  const RankPool::Answers answers = pool.Run("Sleep", "", absl::Seconds(2));
  EXPECT_THAT(answers[0], IsOkAndHolds("awake"));
  EXPECT_THAT(answers[1],
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("Sleep: rank 1 has not answered within "
                                 "2s")));
  EXPECT_THAT(pool.Run("Echo", ""), Each(IsOk()));
}

}  // namespace
}  // namespace tessera
