#include "tests/comm/collective_checks.h"

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/status.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

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

// Of mixed magnitude and sign, so that the order of a sum shows in its bits;
// one in eight is a zero, most of those negative.
double ValueAt(int rank, int64_t i) {
  const uint64_t hash =
      MixBits(static_cast<uint64_t>(rank) * 1000003 + i + kMixStep);
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
  if (dtype == at::kHalf) return (t / 1000).to(dtype);  // sums stay finite
  if (dtype == at::kBool) return t.abs().to(at::kLong).remainder(3) == 0;
  if (at::isIntegralType(dtype, /*includeBool=*/false)) {
    return t.to(at::kLong).to(dtype);  // wraps
  }
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
at::Tensor WideSum(const std::vector<int>& ranks, int64_t begin, int64_t numel,
                   at::ScalarType dtype) {
  at::Tensor sum = Values(ranks[0], numel, dtype, begin).to(at::kFloat);
  for (size_t k = 1; k < ranks.size(); ++k) {
    sum += Values(ranks[k], numel, dtype, begin).to(at::kFloat);
  }
  return sum.to(dtype);
}

}  // namespace

at::Tensor SumInOrder(const std::vector<int>& ranks, int64_t begin,
                      int64_t numel, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ScalarSum<float>(ranks, begin, numel, dtype);
    case at::kDouble:
      return ScalarSum<double>(ranks, begin, numel, dtype);
    case at::kHalf:
    case at::kBFloat16:
      return WideSum(ranks, begin, numel, dtype);
    case at::kInt:
      return ScalarSum<int32_t>(ranks, begin, numel, dtype);
    case at::kShort:
      return ScalarSum<int16_t>(ranks, begin, numel, dtype);
    case at::kChar:
      return ScalarSum<int8_t>(ranks, begin, numel, dtype);
    case at::kByte:
      return ScalarSum<uint8_t>(ranks, begin, numel, dtype);
    case at::kBool:
      return ScalarSum<bool>(ranks, begin, numel, dtype);
    default:
      return ScalarSum<int64_t>(ranks, begin, numel, dtype);
  }
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  if (a.nbytes() != b.nbytes()) return false;
  return a.nbytes() == 0 ||
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

absl::Status ExpectBits(const at::Tensor& got, const at::Tensor& want,
                        absl::string_view what) {
  if (SameBits(got, want)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": bits differ"));
}

namespace {

at::Tensor ExpectedSum(int world_size, int64_t begin, int64_t numel,
                       at::ScalarType dtype) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return SumInOrder(ranks, begin, numel, dtype);
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

TESSERA_RANK_FUNCTION(CheckAllToAll) {
  const CaseArgs c = ParseArgs(args);
  const int w = world.world_size();
  const at::Tensor sent = Values(world.rank(), w * c.numel, c.dtype);
  const at::Tensor mine = sent.clone();
  at::Tensor received = torch::zeros_like(sent);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllToAll(sent, received, {"all to all"}).Wait());
  std::vector<at::Tensor> parts;
  for (int r = 0; r < w; ++r) {
    parts.push_back(Values(r, c.numel, c.dtype, world.rank() * c.numel));
  }
  TESSERA_RETURN_IF_ERROR(ExpectBits(received, torch::cat(parts), "received"));
  TESSERA_RETURN_IF_ERROR(ExpectBits(sent, mine, "sent"));
  return "ok";
}

// Around the ranks, then from the first to the last alone.
TESSERA_RANK_FUNCTION(CheckSendReceive) {
  const CaseArgs c = ParseArgs(args);
  const int w = world.world_size(), rank = world.rank();
  Communicator& comm = *world.communicator();
  const at::Tensor mine = Values(rank, c.numel, c.dtype);
  const at::Tensor sent = mine.clone();
  at::Tensor received = torch::zeros_like(sent);
  TESSERA_RETURN_IF_ERROR(comm.SendReceive(sent, (rank + 1) % w, received,
                                           (rank + w - 1) % w, {"around"})
                              .Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      received, Values((rank + w - 1) % w, c.numel, c.dtype), "received"));
  TESSERA_RETURN_IF_ERROR(ExpectBits(sent, mine, "sent"));
  if (w == 1) return "ok";
  CommFuture moved;
  if (rank == 0) {
    moved = comm.Send(sent, w - 1, {"to the last"});
  } else if (rank == w - 1) {
    received.zero_();
    moved = comm.Receive(received, 0, {"to the last"});
  } else {
    moved = comm.SendReceive(sent, -1, received, -1, {"to the last"});
  }
  TESSERA_RETURN_IF_ERROR(moved.Wait());
  const int from = rank == w - 1 ? 0 : (rank + w - 1) % w;
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(received, Values(from, c.numel, c.dtype), "last"));
  TESSERA_RETURN_IF_ERROR(ExpectBits(sent, mine, "sent once"));
  return "ok";
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

}  // namespace
namespace {

// Of rank `rank`, from element `begin` on.
at::Tensor Values(int rank, int64_t numel, int64_t begin = 0) {
  return SumInOrder({rank}, begin, numel, at::kFloat);
}

}  // namespace

absl::Status CheckTensorCollectives(const World& world, Communicator& comm,
                                    at::Device device) {
  constexpr int64_t kNumel = 1001;
  const int size = world.world_size();
  std::vector<int> ranks;
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(r);
    all.push_back(Values(r, kNumel));
  }
  const at::Tensor mine = Values(world.rank(), kNumel).to(device);
  at::Tensor whole = torch::zeros({size * kNumel}, device);
  TESSERA_RETURN_IF_ERROR(comm.AllGather(mine, whole, {"gather"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole.cpu(), torch::cat(all), "gather"));

  at::Tensor shard = torch::zeros({kNumel}, device);
  TESSERA_RETURN_IF_ERROR(
      comm.ReduceScatterSum(Values(world.rank(), size * kNumel).to(device),
                            shard, {"scatter"})
          .Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      shard.cpu(), SumInOrder(ranks, world.rank() * kNumel, kNumel, at::kFloat),
      "scatter"));

  at::Tensor sum = mine.clone();
  TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(sum, {"reduce"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(
      sum.cpu(), SumInOrder(ranks, 0, kNumel, at::kFloat), "reduce"));

  at::Tensor root = mine.clone();
  TESSERA_RETURN_IF_ERROR(comm.Broadcast(root, 1, {"broadcast"}).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(root.cpu(), all[1], "broadcast"));

  const int rank = world.rank();
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) {
    parts.push_back(Values(r, kNumel, rank * kNumel));
  }
  whole.zero_();
  TESSERA_RETURN_IF_ERROR(
      comm.AllToAll(Values(rank, size * kNumel).to(device), whole, {"parts"})
          .Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(whole.cpu(), torch::cat(parts), "parts"));

  // From the first to the last; those between take no part in it.
  at::Tensor last = mine.clone();
  TESSERA_RETURN_IF_ERROR((rank == 0 ? comm.Send(last, size - 1, {"last"})
                           : rank == size - 1
                               ? comm.Receive(last, 0, {"last"})
                               : comm.SendReceive(last, -1, last, -1, {"last"}))
                              .Wait());
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(last.cpu(), all[rank == size - 1 ? 0 : rank], "last"));

  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      comm.AllGatherStrings(std::string(world.rank() * 300, 'x'), {"texts"}));
  for (int r = 0; r < size; ++r) {
    if (texts[r] != std::string(r * 300, 'x')) {
      return absl::InternalError(absl::StrCat("text of rank ", r));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHalves(const World& world, Communicator& comm,
                         at::Device device) {
  constexpr int64_t kNumel = 1001;
  std::vector<int> ranks;
  for (int r = 0; r < world.world_size(); ++r) ranks.push_back(r);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor whole =
        SumInOrder({world.rank()}, 0, world.world_size() * kNumel, dtype)
            .to(device);
    at::Tensor shard = torch::zeros({kNumel}, whole.options());
    TESSERA_RETURN_IF_ERROR(
        comm.ReduceScatterSum(whole, shard, {"halves"}, /*divisor=*/3).Wait());
    TESSERA_RETURN_IF_ERROR(ExpectBits(
        shard.cpu(),
        SumInOrder(ranks, world.rank() * kNumel, kNumel, dtype).div(3),
        "halves"));
  }
  return absl::OkStatus();
}

}  // namespace tessera
