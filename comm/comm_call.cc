#include "comm/comm_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"

namespace tessera {
namespace {

absl::Status CheckTensor(const at::Tensor& t, absl::string_view name) {
  if (!t.defined()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is undefined"));
  }
  if (!t.is_contiguous()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not contiguous"));
  }
  return absl::OkStatus();
}

bool SameKind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

bool AreApart(const at::Tensor& a, const at::Tensor& b) {
  const auto first = reinterpret_cast<uintptr_t>(a.const_data_ptr());
  const auto second = reinterpret_cast<uintptr_t>(b.const_data_ptr());
  return first + a.nbytes() <= second || second + b.nbytes() <= first;
}

// True unless `shard` overlaps `whole` other than as the own slice of it.
bool IsOwnSliceOrApart(const at::Tensor& whole, const at::Tensor& shard,
                       int rank) {
  const auto begin = reinterpret_cast<uintptr_t>(whole.const_data_ptr());
  const auto own = reinterpret_cast<uintptr_t>(shard.const_data_ptr());
  return own == begin + rank * shard.nbytes() || AreApart(whole, shard);
}

absl::Status CheckShardOfWhole(const at::Tensor& shard, const at::Tensor& whole,
                               int rank, int world_size) {
  TESSERA_RETURN_IF_ERROR(CheckTensor(shard, "shard"));
  TESSERA_RETURN_IF_ERROR(CheckTensor(whole, "whole"));
  if (whole.numel() != shard.numel() * world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("whole has ", whole.numel(), " elements, expected ",
                     world_size, " ranks * ", shard.numel()));
  }
  if (!SameKind(shard, whole)) {
    return absl::InvalidArgumentError(
        "shard and whole differ in dtype or device");
  }
  if (!IsOwnSliceOrApart(whole, shard, rank)) {
    return absl::InvalidArgumentError(
        "shard overlaps whole and is not this rank's slice of it");
  }
  return absl::OkStatus();
}

absl::Status CheckRank(absl::string_view name, int rank, int least,
                       int world_size) {
  if (least <= rank && rank < world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " is ", rank, ", expected ", least, " to ", world_size - 1));
}

absl::Status CheckMoved(const CommCall& call, int world_size) {
  TESSERA_RETURN_IF_ERROR(CheckTensor(call.in, "what is sent"));
  TESSERA_RETURN_IF_ERROR(CheckTensor(call.out, "what is received"));
  if (call.in.numel() != call.out.numel() || !SameKind(call.in, call.out)) {
    return absl::InvalidArgumentError(
        "what is sent and received differ in size, dtype or device");
  }
  const bool all = call.op == CollectiveOp::kAllToAll;
  if (all && call.out.numel() % world_size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("what is sent has ", call.in.numel(),
                     " elements, expected a multiple of ", world_size));
  }
  if (!all) {
    TESSERA_RETURN_IF_ERROR(CheckRank("to", call.to, -1, world_size));
    TESSERA_RETURN_IF_ERROR(CheckRank("from", call.from, -1, world_size));
    if (call.to < 0 || call.from < 0) return absl::OkStatus();
  }
  if (AreApart(call.in, call.out)) return absl::OkStatus();
  return absl::InvalidArgumentError("what is sent and received overlap");
}

}  // namespace

std::string CommCall::Name() const {
  return absl::StrCat(what, " (", details, ")");
}

const at::Tensor& CommCall::whole() const {
  return in.defined() && in.numel() > out.numel() ? in : out;
}

c10::Device CommCall::device() const {
  return out.defined() ? out.device() : c10::Device(c10::kCPU);
}

CommCall TextsWithin(const CommCall& call, std::string text,
                     std::vector<std::string>* texts) {
  CommCall result;
  result.text = std::move(text);
  result.texts = texts;
  result.what = call.what;
  result.sequence = call.sequence;
  result.signature = call.signature;
  result.details = call.details;
  return result;
}

MovedParts PartsOf(const CommCall& call, int world_size) {
  const bool all = call.op == CollectiveOp::kAllToAll;
  const int64_t numel = call.out.numel() / (all ? world_size : 1);
  MovedParts parts;
  parts.sent.resize(world_size);
  parts.received.resize(world_size);
  parts.bytes = numel * static_cast<int64_t>(call.out.element_size());
  for (int r = 0; r < world_size; ++r) {
    const int64_t begin = all ? r * numel : 0;
    if (all || r == call.to)
      parts.sent[r] = ElementsOver(call.in, begin, numel);
    if (all || r == call.from) {
      parts.received[r] = ElementsOver(call.out, begin, numel);
    }
  }
  return parts;
}

absl::Status CheckCall(const CommCall& call, int rank, int world_size) {
  switch (call.op) {
    case CollectiveOp::kAllGather:
      return CheckShardOfWhole(call.in, call.out, rank, world_size);
    case CollectiveOp::kReduceScatter:
      return CheckShardOfWhole(call.out, call.in, rank, world_size);
    case CollectiveOp::kAllReduce:
      return CheckTensor(call.out, "tensor");
    case CollectiveOp::kBroadcast:
      TESSERA_RETURN_IF_ERROR(CheckTensor(call.out, "tensor"));
      return CheckRank("root", call.root, 0, world_size);
    case CollectiveOp::kAllToAll:
    case CollectiveOp::kSendReceive:
      return CheckMoved(call, world_size);
    default:
      return absl::OkStatus();
  }
}

}  // namespace tessera
