// The conformance of a communicator of 2, 3 and 4 ranks: every collective, at
// sizes around the world size, to the bit.
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Args are "<dtype> <numel> <variant>".
struct CaseArgs {
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  bool in_place = false;
};

CaseArgs ParseArgs(absl::string_view args) {
  const std::vector<std::string> parts = absl::StrSplit(args, ' ');
  CaseArgs result;
  int dtype = 0;
  TORCH_CHECK(parts.size() == 3 && absl::SimpleAtoi(parts[0], &dtype) &&
              absl::SimpleAtoi(parts[1], &result.numel));
  result.dtype = static_cast<at::ScalarType>(dtype);
  result.in_place = parts[2] == "in_place";
  return result;
}

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of mixed magnitude and sign, so that the order of a sum shows in its bits;
// one in eight is a zero, most of those negative.
double ValueAt(int rank, int64_t i) {
  const uint64_t hash = Mix(static_cast<uint64_t>(rank) * 1000003 + i);
  if (hash % 8 == 0) return (hash >> 8) % 4 == 0 ? 0.0 : -0.0;
  static constexpr double kScales[] = {1e-4, 1e-3, 1e-2, 0.1, 1,
                                       10,   100,  1e3,  1e4};
  const double mantissa = static_cast<double>(hash >> 40) / 4096 - 2048;
  return mantissa * kScales[hash % 9];
}

// Elements [begin, begin + numel) of rank's endless vector.
at::Tensor Values(int rank, int64_t numel, at::ScalarType dtype,
                  int64_t begin = 0) {
  at::Tensor t = torch::empty({numel}, torch::kDouble);
  double* data = t.data_ptr<double>();
  for (int64_t i = 0; i < numel; ++i) data[i] = ValueAt(rank, begin + i);
  if (dtype == at::kLong) return t.to(at::kLong);
  if (dtype == at::kByte) return t.abs().remainder(251).to(at::kByte);
  return t.to(dtype);
}

// By a plain loop over ranks in the order given.
template <typename T>
at::Tensor ScalarSum(const std::vector<int>& ranks, int64_t begin,
                     int64_t numel, at::ScalarType dtype) {
  at::Tensor sum = Values(ranks[0], numel, dtype, begin);
  T* data = sum.data_ptr<T>();
  for (size_t k = 1; k < ranks.size(); ++k) {
    const at::Tensor next = Values(ranks[k], numel, dtype, begin);
    const T* values = next.data_ptr<T>();
    for (int64_t i = 0; i < numel; ++i) data[i] += values[i];
  }
  return sum;
}

// In float32, rounded once.
at::Tensor Bf16Sum(const std::vector<int>& ranks, int64_t begin,
                   int64_t numel) {
  at::Tensor sum = Values(ranks[0], numel, at::kBFloat16, begin).to(at::kFloat);
  for (size_t k = 1; k < ranks.size(); ++k) {
    sum += Values(ranks[k], numel, at::kBFloat16, begin).to(at::kFloat);
  }
  return sum.to(at::kBFloat16);
}

at::Tensor SumInOrder(const std::vector<int>& ranks, int64_t begin,
                      int64_t numel, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ScalarSum<float>(ranks, begin, numel, dtype);
    case at::kDouble:
      return ScalarSum<double>(ranks, begin, numel, dtype);
    case at::kBFloat16:
      return Bf16Sum(ranks, begin, numel);
    default:
      return ScalarSum<int64_t>(ranks, begin, numel, dtype);
  }
}

at::Tensor ExpectedSum(int world_size, int64_t begin, int64_t numel,
                       at::ScalarType dtype) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return SumInOrder(ranks, begin, numel, dtype);
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

absl::Status ExpectBits(const at::Tensor& got, const at::Tensor& want,
                        absl::string_view what) {
  if (SameBits(got, want)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": bits differ"));
}

TESSERA_RANK_FUNCTION(CheckAllGather) {
  const CaseArgs c = ParseArgs(args);
  const int w = world.world_size();
  std::vector<at::Tensor> all;
  for (int r = 0; r < w; ++r) all.push_back(Values(r, c.numel, c.dtype));
  at::Tensor whole = torch::zeros({w * c.numel}, c.dtype);
  at::Tensor own = whole.narrow(0, world.rank() * c.numel, c.numel);
  at::Tensor shard = c.in_place ? own : all[world.rank()].clone();
  if (c.in_place) own.copy_(all[world.rank()]);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllGather(shard, whole, {"gather"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(shard, all[world.rank()], "shard"));
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole, torch::cat(all), "whole"));
  return "ok";
}

TESSERA_RANK_FUNCTION(CheckReduceScatter) {
  const CaseArgs c = ParseArgs(args);
  const int w = world.world_size();
  const at::Tensor mine = Values(world.rank(), w * c.numel, c.dtype);
  at::Tensor whole = mine.clone();
  at::Tensor own = whole.narrow(0, world.rank() * c.numel, c.numel);
  at::Tensor shard = c.in_place ? own : torch::zeros({c.numel}, c.dtype);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->ReduceScatterSum(whole, shard, {"scatter"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      shard, ExpectedSum(w, world.rank() * c.numel, c.numel, c.dtype),
      "shard"));
  if (c.in_place) own.copy_(mine.narrow(0, world.rank() * c.numel, c.numel));
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole, mine, "whole"));
  return "ok";
}

TESSERA_RANK_FUNCTION(CheckAllReduce) {
  const CaseArgs c = ParseArgs(args);
  const int w = world.world_size();
  at::Tensor t = Values(world.rank(), c.numel, c.dtype);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(t, {"reduce"}).Wait());
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(t, ExpectedSum(w, 0, c.numel, c.dtype), "sum"));
  return "ok";
}

TESSERA_RANK_FUNCTION(CheckBroadcast) {
  const CaseArgs c = ParseArgs(args);
  for (int root = 0; root < world.world_size(); ++root) {
    at::Tensor t = Values(world.rank(), c.numel, c.dtype);
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->Broadcast(t, root, {"broadcast"}).Wait());
    TESSERA_RETURN_IF_ERROR(
        ExpectBits(t, Values(root, c.numel, c.dtype), "tensor"));
  }
  return "ok";
}

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

TEST(ValuesTest, ShowTheOrderOfTheirSum) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor sum = SumInOrder({0, 1, 2}, 0, 9973, dtype);
    EXPECT_FALSE(SameBits(sum, SumInOrder({2, 1, 0}, 0, 9973, dtype)));
    EXPECT_FALSE(SameBits(sum, SumInOrder({1, 2, 0}, 0, 9973, dtype)));
  }
}

// Several pieces, the last one short, for every rank.
TESSERA_RANK_FUNCTION(ReduceScatterInPieces) {
  MemoryLedger::Global().ResetPeak();
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
      MemoryLedger::Global().Report()[MemoryKind::kCommunication];
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

// Rank r's string has the r-th of the lengths, which go around.
std::string TextOf(int rank, int shift) {
  static constexpr size_t kLengths[] = {0, 1, 247, 248, 249, 100000};
  std::string text;
  for (size_t i = 0; i < kLengths[(rank + shift) % 6]; ++i) {
    text.push_back(static_cast<char>(i * 7 + rank));  // zero bytes among them
  }
  return text;
}

TESSERA_RANK_FUNCTION(GatherTexts) {
  for (int shift = 0; shift < 6; ++shift) {
    TESSERA_ASSIGN_OR_RETURN(std::vector<std::string> texts,
                             world.communicator()->AllGatherStrings(
                                 TextOf(world.rank(), shift), {"texts"}));
    for (int r = 0; r < world.world_size(); ++r) {
      if (texts.at(r) != TextOf(r, shift)) {
        return absl::InternalError(absl::StrCat(shift, ": text of rank ", r));
      }
    }
  }
  return "ok";
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
