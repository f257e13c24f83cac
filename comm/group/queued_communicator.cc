#include "comm/group/queued_communicator.h"

#include <utility>

#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/bits.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"

namespace tessera {
namespace {

// The same on every rank, unlike absl::Hash.
uint32_t Hash31(absl::string_view text) {
  const uint64_t hash =
      Fingerprint(text.data(), static_cast<int64_t>(text.size()));
  return static_cast<uint32_t>(hash ^ (hash >> 32)) & 0x7fffffff;
}

const char* DtypeName(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kByte:
      return "uint8";
    default:
      return c10::toString(t.scalar_type());
  }
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

// `membership` with what was left out.
template <typename Membership>
Membership Completed(Membership membership) {
  if (membership.failure == nullptr)
    membership.failure = std::make_shared<FirstFailure>();
  if (membership.thread == nullptr) membership.thread = &CommThread::Get();
  return membership;
}

CommFuture Refused(const absl::Status& status, const CommTag& tag) {
  return DoneFuture(Annotate(status, tag.what));
}

}  // namespace

CollectiveRecord RecordOf(CollectiveOp op, const at::Tensor& tensor) {
  CollectiveRecord record;
  record.op = op;
  record.bytes = static_cast<int64_t>(tensor.nbytes());
  record.dtype = DtypeName(tensor);
  if (op == CollectiveOp::kReduceScatter || op == CollectiveOp::kAllReduce) {
    record.reduce = "sum";
  }
  return record;
}

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

QueuedCommunicator::QueuedCommunicator(Membership membership)
    : membership_(Completed(std::move(membership))),
      log_({rank(), world_size(), CommTraceWanted(), membership_.group}) {}

absl::Status QueuedCommunicator::RunCall(CollectiveRecord record,
                                         const Body& body) {
  absl::Status status = failure();
  if (!status.ok()) {
    recorder_.Leave(record.ticket, status);
    return status;
  }
  Call call;
  call.op = record.op;
  call.what = record.Title();
  call.sequence = record.sequence = ++sequence_;
  if (!membership_.in_call) {  // alone there is nobody to agree with
    call.details = record.Describe();
    // What it is for too: two units may have the same size.
    call.signature =
        Hash31(absl::StrCat(call.sequence, " ", call.details, " ", call.what));
  }
  TESSERA_VLOG(comm, 2) << call.what << " #" << call.sequence;
  recorder_.Enter(record.ticket, record.sequence);
  record.entered = MonotonicNow();
  record.status = CatchTorch(call.what, [&] { return body(call); });
  record.left = MonotonicNow();
  recorder_.Leave(record.ticket, record.status);
  log_.Add(record);
  if (!record.status.ok()) {
    membership_.failure->Set(record.status);
    TellFailure(record.status);
  }
  return record.status;
}

CommFuture QueuedCommunicator::Enqueue(CollectiveRecord record, CommTag tag,
                                       Body body, Done done) {
  record.what = tag.what.empty() ? std::string(CollectiveName(record.op))
                                 : std::move(tag.what);
  record.group = membership_.group;
  record.site = tag.site;
  record.enqueued = MonotonicNow();
  record.ticket = recorder_.Enqueue(record);
  if (membership_.in_call) {
    c10::AutoGradMode no_grad(false);  // as on the communication thread
    const absl::Status status = RunCall(std::move(record), body);
    if (done) done(status);
    return status.ok() ? CommFuture() : DoneFuture(status);
  }
  return membership_.thread->Post(
      [self = shared_from_this(), record = std::move(record),
       body = std::move(body), done = std::move(done)] {
        const absl::Status status = self->RunCall(record, body);
        if (done) done(status);
        return status;
      });
}

CommFuture QueuedCommunicator::AllGather(at::Tensor shard, at::Tensor whole,
                                         CommTag tag) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(whole);
  return Enqueue(RecordOf(CollectiveOp::kAllGather, whole), std::move(tag),
                 [this, shard, whole](const Call& call) {
                   return DoAllGather(call, shard, whole);
                 });
}

CommFuture QueuedCommunicator::ReduceScatterSum(at::Tensor whole,
                                                at::Tensor shard, CommTag tag,
                                                double divisor) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(whole);
  return Enqueue(RecordOf(CollectiveOp::kReduceScatter, whole), std::move(tag),
                 [this, shard, whole, divisor](const Call& call) {
                   return divisor == 1
                              ? DoReduceScatterSum(call, whole, shard)
                              : DoReduceScatter(call, whole, shard, divisor);
                 });
}

absl::Status QueuedCommunicator::DoReduceScatter(const Call& call,
                                                 const at::Tensor& whole,
                                                 const at::Tensor& shard,
                                                 double divisor) {
  TESSERA_RETURN_IF_ERROR(DoReduceScatterSum(call, whole, shard));
  shard.div_(divisor);
  SynchronizeCurrentStream(shard);  // this thread's: others use their own
  return absl::OkStatus();
}

CommFuture QueuedCommunicator::AllReduceSum(at::Tensor tensor, CommTag tag) {
  absl::Status valid = CheckTensor(tensor, "tensor");
  if (!valid.ok()) return Refused(valid, tag);
  if (tensor.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(tensor);
  return Enqueue(RecordOf(CollectiveOp::kAllReduce, tensor), std::move(tag),
                 [this, tensor](const Call& call) {
                   return DoAllReduceSum(call, tensor);
                 });
}

CommFuture QueuedCommunicator::Broadcast(at::Tensor tensor, int root,
                                         CommTag tag) {
  absl::Status valid = CheckTensor(tensor, "tensor");
  if (valid.ok() && (root < 0 || root >= world_size())) {
    valid = absl::InvalidArgumentError(
        absl::StrCat("root is ", root, ", expected 0 to ", world_size() - 1));
  }
  if (!valid.ok()) return Refused(valid, tag);
  if (tensor.numel() == 0) return DoneFuture(failure());
  SynchronizeCurrentStream(tensor);
  CollectiveRecord record = RecordOf(CollectiveOp::kBroadcast, tensor);
  record.root = root;
  return Enqueue(std::move(record), std::move(tag),
                 [this, tensor, root](const Call& call) {
                   return DoBroadcast(call, tensor, root);
                 });
}

absl::StatusOr<std::vector<std::string>> QueuedCommunicator::AllGatherStrings(
    absl::string_view mine, CommTag tag) {
  std::vector<std::string> all;
  CollectiveRecord record;
  record.bytes = static_cast<int64_t>(mine.size());
  CommFuture future = Enqueue(
      std::move(record), std::move(tag),
      [this, &all, mine = std::string(mine)](const Call& call) -> absl::Status {
        TESSERA_ASSIGN_OR_RETURN(all, DoAllGatherStrings(call, mine));
        return absl::OkStatus();
      });
  TESSERA_RETURN_IF_ERROR(future.Wait());
  return all;
}

}  // namespace tessera
