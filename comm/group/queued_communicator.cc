#include "comm/group/queued_communicator.h"

#include <optional>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/bits.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"
#include "comm/group/comm_stream.h"
#include "comm/reduce/element_type.h"

namespace tessera {
namespace {

// The same on every rank, unlike absl::Hash.
uint32_t Hash31(absl::string_view text) {
  const uint64_t hash =
      Fingerprint(text.data(), static_cast<int64_t>(text.size()));
  return static_cast<uint32_t>(hash ^ (hash >> 32)) & 0x7fffffff;
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
  return membership;
}

std::optional<c10::Stream> CurrentStream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// What a wait for a collective counts as.
CommPurpose PurposeOf(const CollectiveRecord& record, WaitReason reason) {
  if (reason != WaitReason::kOther) return {reason, record.what};
  switch (record.op) {
    case CollectiveOp::kAllGather:
    case CollectiveOp::kPull:
      return {WaitReason::kGather, record.what};
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllReduce:
      return {WaitReason::kReduction, record.what};
    case CollectiveOp::kText:
      return {WaitReason::kAgreement, record.what};
    default:
      return {WaitReason::kOther, record.what};
  }
}

CommFuture Refused(const absl::Status& status, const CommTag& tag) {
  return DoneFuture(Annotate(status, tag.what));
}

}  // namespace

CollectiveRecord RecordOf(CollectiveOp op, const at::Tensor& tensor) {
  CollectiveRecord record;
  record.op = op;
  record.bytes = static_cast<int64_t>(tensor.nbytes());
  record.dtype = DtypeName(tensor.scalar_type());
  if (op == CollectiveOp::kReduceScatter || op == CollectiveOp::kAllReduce) {
    record.reduce = "sum";
  }
  return record;
}

QueuedCommunicator::QueuedCommunicator(Membership membership)
    : membership_(Completed(std::move(membership))),
      log_({rank(), world_size(), membership_.group}) {}

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
  status = CatchTorch(call.what, [&] { return body(call); });
  if (Body end = TakeDeviceEnd(status)) {
    return WatchDevice(record, call, std::move(end));
  }
  return Note(std::move(record), std::move(status));
}

absl::Status QueuedCommunicator::WatchDevice(const CollectiveRecord& record,
                                             const Call& call, Body end) {
  // Without a thread for it this one waits.
  if (!CommThread::OfDevices().Start().ok()) {
    return Note(record, CatchTorch(call.what, [&] { return end(call); }));
  }
  CommThread::OfDevices().Post([self = shared_from_this(),
                                record = CollectiveRecord(record), call,
                                end = std::move(end)]() mutable {
    record.entered = MonotonicNow();  // those before it have ended
    absl::Status status = CatchTorch(call.what, [&] { return end(call); });
    return self->Note(std::move(record), std::move(status));
  });
  return absl::OkStatus();
}

absl::Status QueuedCommunicator::Note(CollectiveRecord record,
                                      absl::Status status) {
  record.left = MonotonicNow();
  record.status = std::move(status);
  recorder_.Leave(record.ticket, record.status);
  log_.Add(record);
  if (!record.status.ok()) {
    membership_.failure->Set(record.status);
    TellFailure(record.status);
  }
  return record.status;
}

CommFuture QueuedCommunicator::Enqueue(CollectiveRecord record, CommTag tag,
                                       Body body, c10::Device device) {
  record.what = tag.what.empty() ? std::string(CollectiveName(record.op))
                                 : std::move(tag.what);
  record.group = membership_.group;
  record.site = tag.site;
  record.enqueued = MonotonicNow();
  record.ticket = recorder_.Enqueue(record);
  if (membership_.in_call) {
    c10::AutoGradMode no_grad(false);  // as on the communication thread
    StreamPoint result;
    const absl::Status status =
        RunCall(std::move(record), [&](const Call& call) -> absl::Status {
          if (tag.ready) TESSERA_RETURN_IF_ERROR(tag.ready());
          TESSERA_RETURN_IF_ERROR(body(call));
          result = StreamPoint::Now(device);
          return absl::OkStatus();
        });
    if (status.ok() && device.is_cpu()) return CommFuture();
    CommThread::End end(status);
    end.result = result;
    return DoneFuture(std::move(end));
  }
  CommPurpose purpose = PurposeOf(record, tag.reason);
  CommThread::Work work = [self = shared_from_this(),
                           record = std::move(record),
                           body = std::make_shared<Body>(std::move(body)),
                           device, caller = CurrentStream(device),
                           after = StreamPoint::Now(device),
                           ready = std::move(tag.ready)]() {
    // Within the call: a device that has failed is the call's failure,
    // which the other ranks are told of.
    CommThread::End end;
    end.status = self->RunCall(record, [&](const Call& call) {
      const OnCommStream scope(device, after);
      if (ready) TESSERA_RETURN_IF_ERROR(ready());
      absl::Status status = (*body)(call);
      status.Update(CatchTorch(call.what, [&] { end.result = scope.Now(); }));
      return status;
    });
    if (!device.is_cpu()) {
      end.held = body;  // with its tensors
      end.caller = caller;
    }
    return end;
  };
  return CommThread::Get().Post(std::move(work), std::move(purpose));
}

absl::Status QueuedCommunicator::RunAllGather(const Call& call,
                                              const at::Tensor& shard,
                                              const at::Tensor& whole) {
  if (!NeedsCopy(whole)) return DoAllGather(call, shard, whole);
  const at::Tensor host = at::empty(whole.sizes(), whole.dtype());
  TESSERA_RETURN_IF_ERROR(DoAllGather(call, shard.cpu(), host));
  whole.copy_(host);
  return absl::OkStatus();
}

absl::Status QueuedCommunicator::RunReduceScatter(const Call& call,
                                                  const at::Tensor& whole,
                                                  const at::Tensor& shard,
                                                  double divisor) {
  if (!NeedsCopy(whole)) return DoReduceScatter(call, whole, shard, divisor);
  const at::Tensor host = at::empty(shard.sizes(), shard.dtype());
  // Divided here: a device may multiply by the reciprocal, and the bits must
  // not depend on the backend.
  TESSERA_RETURN_IF_ERROR(DoReduceScatter(call, whole.cpu(), host, divisor));
  shard.copy_(host);
  return absl::OkStatus();
}

absl::Status QueuedCommunicator::RunInPlace(
    const at::Tensor& tensor,
    const std::function<absl::Status(const at::Tensor&)>& collective) {
  if (!NeedsCopy(tensor)) return collective(tensor);
  const at::Tensor host = tensor.cpu();
  TESSERA_RETURN_IF_ERROR(collective(host));
  tensor.copy_(host);
  return absl::OkStatus();
}

CommFuture QueuedCommunicator::AllGather(at::Tensor shard, at::Tensor whole,
                                         CommTag tag) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  return Enqueue(
      RecordOf(CollectiveOp::kAllGather, whole), std::move(tag),
      [this, shard, whole](const Call& call) {
        return RunAllGather(call, shard, whole);
      },
      whole.device());
}

CommFuture QueuedCommunicator::ReduceScatterSum(at::Tensor whole,
                                                at::Tensor shard, CommTag tag,
                                                double divisor) {
  absl::Status valid = CheckShardOfWhole(shard, whole, *this);
  if (!valid.ok()) return Refused(valid, tag);
  if (shard.numel() == 0) return DoneFuture(failure());
  return Enqueue(
      RecordOf(CollectiveOp::kReduceScatter, whole), std::move(tag),
      [this, shard, whole, divisor](const Call& call) {
        return RunReduceScatter(call, whole, shard, divisor);
      },
      whole.device());
}

CommFuture QueuedCommunicator::AllReduceSum(at::Tensor tensor, CommTag tag) {
  absl::Status valid = CheckTensor(tensor, "tensor");
  if (!valid.ok()) return Refused(valid, tag);
  if (tensor.numel() == 0) return DoneFuture(failure());
  return Enqueue(
      RecordOf(CollectiveOp::kAllReduce, tensor), std::move(tag),
      [this, tensor](const Call& call) {
        return RunInPlace(tensor, [&](const at::Tensor& t) {
          return DoAllReduceSum(call, t);
        });
      },
      tensor.device());
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
  CollectiveRecord record = RecordOf(CollectiveOp::kBroadcast, tensor);
  record.root = root;
  return Enqueue(
      std::move(record), std::move(tag),
      [this, tensor, root](const Call& call) {
        return RunInPlace(tensor, [&](const at::Tensor& t) {
          return DoBroadcast(call, t, root);
        });
      },
      tensor.device());
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
