#include "comm/queued_communicator.h"

#include <utility>

#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"

namespace tessera {
namespace {

absl::string_view OpName(int op) {
  static constexpr absl::string_view kNames[] = {
      "all-gather", "reduce-scatter", "all-reduce", "broadcast", "agreement"};
  return kNames[op];
}

// FNV-1a: the same on every rank, unlike absl::Hash.
uint32_t Hash31(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return static_cast<uint32_t>(hash ^ (hash >> 32)) & 0x7fffffff;
}

std::string Fingerprint(const at::Tensor& t, int64_t numel) {
  return absl::StrCat(numel, " ", static_cast<int>(t.scalar_type()));
}

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

// True unless `shard` overlaps `whole` other than as the own slice of it.
bool IsOwnSliceOrApart(const at::Tensor& whole, const at::Tensor& shard,
                       int rank) {
  const auto begin = reinterpret_cast<uintptr_t>(whole.const_data_ptr());
  const auto own = reinterpret_cast<uintptr_t>(shard.const_data_ptr());
  const uintptr_t shard_bytes = shard.nbytes();
  return own == begin + rank * shard_bytes || own + shard_bytes <= begin ||
         own >= begin + whole.nbytes();
}

absl::Status CheckShardOfWhole(const at::Tensor& shard, const at::Tensor& whole,
                               const Communicator& comm) {
  TESSERA_RETURN_IF_ERROR(CheckTensor(shard, "shard"));
  TESSERA_RETURN_IF_ERROR(CheckTensor(whole, "whole"));
  if (whole.numel() != shard.numel() * comm.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("whole has ", whole.numel(), " elements, expected ",
                     comm.world_size(), " ranks * ", shard.numel()));
  }
  if (!SameKind(shard, whole)) {
    return absl::InvalidArgumentError(
        "shard and whole differ in dtype or device");
  }
  if (!IsOwnSliceOrApart(whole, shard, comm.rank())) {
    return absl::InvalidArgumentError(
        "shard overlaps whole and is not this rank's slice of it");
  }
  return absl::OkStatus();
}

CommFuture Refused(const absl::Status& status, const CommTag& tag) {
  return DoneFuture(Annotate(status, tag.what));
}

}  // namespace

at::Tensor BorrowElements(const at::Tensor& t, int64_t begin, int64_t numel) {
  char* data = static_cast<char*>(t.mutable_data_ptr());
  return at::from_blob(data + begin * t.element_size(), {numel},
                       at::TensorOptions().dtype(t.dtype()).device(t.device()));
}

void SynchronizeCurrentStream(const at::Tensor& t) {
  if (t.device().is_cpu()) return;
  c10::impl::VirtualGuardImpl(t.device().type())
      .getStream(t.device())
      .synchronize();
}

absl::Status QueuedCommunicator::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status QueuedCommunicator::RunCall(Call call,
                                         const std::string& fingerprint,
                                         const Body& body) {
  TESSERA_RETURN_IF_ERROR(failure());
  call.sequence = ++sequence_;
  // What it is for too: two units may have the same size.
  call.signature =
      Hash31(absl::StrCat(static_cast<int>(call.op), " ", call.sequence, " ",
                          fingerprint, " ", call.what));
  TESSERA_VLOG(comm, 2) << call.what << " #" << call.sequence;
  absl::Status status = CatchTorch(call.what, [&] { return body(call); });
  if (!status.ok()) {
    absl::MutexLock lock(&mutex_);
    failure_ = status;
  }
  return status;
}

CommFuture QueuedCommunicator::Enqueue(Call::Op op, CommTag tag,
                                       std::string fingerprint, Body body) {
  Call call;
  call.op = op;
  call.what = tag.what.empty() ? std::string(OpName(static_cast<int>(op)))
                               : std::move(tag.what);
  return CommThread::Get().Post(
      [self = shared_from_this(), call = std::move(call),
       fingerprint = std::move(fingerprint), body = std::move(body)] {
        return self->RunCall(call, fingerprint, body);
      });
}

CommFuture QueuedCommunicator::AllGather(at::Tensor shard, at::Tensor whole,
                                         CommTag tag) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(whole);
  std::string fingerprint = Fingerprint(shard, shard.numel());
  return Enqueue(Call::Op::kAllGather, std::move(tag), std::move(fingerprint),
                 [this, shard, whole](const Call& call) {
                   return DoAllGather(call, shard, whole);
                 });
}

CommFuture QueuedCommunicator::ReduceScatterSum(at::Tensor whole,
                                                at::Tensor shard, CommTag tag) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(whole);
  std::string fingerprint = Fingerprint(shard, shard.numel());
  return Enqueue(Call::Op::kReduceScatter, std::move(tag),
                 std::move(fingerprint),
                 [this, shard, whole](const Call& call) {
                   return DoReduceScatterSum(call, whole, shard);
                 });
}

CommFuture QueuedCommunicator::AllReduceSum(at::Tensor tensor, CommTag tag) {
  absl::Status valid = CheckTensor(tensor, "tensor");
  if (!valid.ok()) return Refused(valid, tag);
  if (tensor.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(tensor);
  std::string fingerprint = Fingerprint(tensor, tensor.numel());
  return Enqueue(Call::Op::kAllReduce, std::move(tag), std::move(fingerprint),
                 [this, tensor](const Call& call) {
                   return DoAllReduceSum(call, tensor);
                 });
}

CommFuture QueuedCommunicator::Broadcast(at::Tensor tensor, int root,
                                         CommTag tag) {
  absl::Status valid = CheckTensor(tensor, "tensor");
  if (valid.ok() && (root < 0 || root >= world_size_)) {
    valid = absl::InvalidArgumentError(
        absl::StrCat("root is ", root, ", expected 0 to ", world_size_ - 1));
  }
  if (!valid.ok()) return Refused(valid, tag);
  if (tensor.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(tensor);
  std::string fingerprint =
      absl::StrCat(Fingerprint(tensor, tensor.numel()), " ", root);
  return Enqueue(Call::Op::kBroadcast, std::move(tag), std::move(fingerprint),
                 [this, tensor, root](const Call& call) {
                   return DoBroadcast(call, tensor, root);
                 });
}

absl::StatusOr<std::vector<std::string>> QueuedCommunicator::AllGatherStrings(
    absl::string_view mine, CommTag tag) {
  std::vector<std::string> all;
  CommFuture future = Enqueue(
      Call::Op::kText, std::move(tag), "",
      [this, &all, mine = std::string(mine)](const Call& call) -> absl::Status {
        TESSERA_ASSIGN_OR_RETURN(all, DoAllGatherStrings(call, mine));
        return absl::OkStatus();
      });
  TESSERA_RETURN_IF_ERROR(future.Wait());
  return all;
}

}  // namespace tessera
