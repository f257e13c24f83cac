#include "comm/group/group_communicator.h"

#include <optional>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/bits.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"
#include "comm/group/comm_stream.h"
#include "comm/reduce/element_type.h"

namespace tessera {
namespace {

// How long ranks in different collectives wait for one to say why.
constexpr absl::Duration kCauseWait = absl::Milliseconds(300);

// Returns a hash that is identical on every rank, unlike absl::Hash.
uint32_t Hash31(absl::string_view text) {
  const uint64_t hash =
      Fingerprint(text.data(), static_cast<int64_t>(text.size()));
  return static_cast<uint32_t>(hash ^ (hash >> 32)) & 0x7fffffff;
}

std::optional<c10::Stream> CurrentStream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

CollectiveRecord RecordOf(const CommCall& call) {
  CollectiveRecord record;
  if (call.op == CollectiveOp::kText) {
    record.bytes = static_cast<int64_t>(call.text.size());
  } else {
    record = tessera::RecordOf(call.op, call.whole());
  }
  record.root = call.root;
  return record;
}

std::vector<int> FirstRanks(const GroupOptions& options) {
  std::vector<int> ranks;
  for (int r = 0; r < options.world_size; ++r) {
    ranks.push_back(options.first_rank(r));
  }
  return ranks;
}

}  // namespace

CollectiveRecord RecordOf(CollectiveOp op, const at::Tensor& tensor) {
  CollectiveRecord record;
  record.op = op;
  record.bytes = static_cast<int64_t>(tensor.nbytes());
  record.dtype = DtypeName(tensor.scalar_type());
  if (TraitsOf(op).sums) record.reduce = "sum";
  return record;
}

absl::StatusOr<std::shared_ptr<GroupCommunicator>> GroupCommunicator::Create(
    const GroupOptions& options, GroupMakers makers,
    std::shared_ptr<FailureDomain> domain,
    std::shared_ptr<Transport> transport) {
  const Capabilities can = transport->capabilities();
  if (can.device && can.waits) {
    TESSERA_RETURN_IF_ERROR(domain->device_monitor().watching());
  }
  return std::shared_ptr<GroupCommunicator>(new GroupCommunicator(
      options, std::move(makers), std::move(domain), std::move(transport)));
}

GroupCommunicator::GroupCommunicator(const GroupOptions& options,
                                     GroupMakers makers,
                                     std::shared_ptr<FailureDomain> domain,
                                     std::shared_ptr<Transport> transport)
    : options_(options),
      makers_(std::move(makers)),
      domain_(std::move(domain)),
      transport_(std::move(transport)),
      can_(transport_->capabilities()),
      in_call_(domain_ == nullptr),
      failure_(domain_ == nullptr ? std::make_shared<FirstFailure>()
                                  : domain_->failure()),
      watched_(std::make_shared<WatchedGroup>(
          WatchedGroup{options.name, FirstRanks(options),
                       [transport = transport_] { transport->Abort(); }})),
      log_(std::make_shared<CommLog>(
          CommLog::Options{rank(), world_size(), options.name})) {
  if (can_.waits) transport_->Listen(MakeListener());
}

GroupCommunicator::~GroupCommunicator() {
  if (can_.waits) domain_->monitor().Forget(options_.name);
}

// Holds nothing of this, nor the transport: that may outlive this.
//
// The domain is held weakly: its monitor's thread may be the last to hold the
// transport (WatchedGroup::abort), and the domain must not end on that thread,
// which its end waits for.
WaitListener GroupCommunicator::MakeListener() const {
  const std::weak_ptr<FailureDomain> weak = domain_;
  WaitListener listener;
  listener.names = watched_->ranks;
  listener.awaited = [weak, names = watched_->ranks](int peer) {
    if (const auto domain = weak.lock()) {
      domain->monitor().SetAwaited(peer < 0 ? -1 : names[peer]);
    }
  };
  listener.waited = [log = log_](int peer, absl::Duration waited) {
    log->AddWait(peer, waited);
  };
  listener.end_of = [weak, names = watched_->ranks](int peer) {
    const auto domain = weak.lock();
    return domain != nullptr ? domain->EndOf(names[peer]) : absl::OkStatus();
  };
  listener.failure = [failure = failure_] { return failure->Get(); };
  return listener;
}

CommFuture GroupCommunicator::Start(CommCall call, CommTag tag) {
  const absl::Status valid = CheckCall(call, rank(), world_size());
  if (!valid.ok()) return DoneFuture(Annotate(valid, tag.what));
  if (call.op != CollectiveOp::kText && call.whole().numel() == 0) {
    return DoneFuture(failure());
  }
  CollectiveRecord record = RecordOf(call);
  record.what = tag.what.empty() ? std::string(CollectiveName(record.op))
                                 : std::move(tag.what);
  record.group = options_.name;
  record.site = tag.site;
  record.enqueued = MonotonicNow();
  record.ticket = recorder_.Enqueue(record);
  const c10::Device device = call.device();
  if (in_call_) {
    c10::AutoGradMode no_grad(false);  // as on the communication thread
    CommThread::End end;
    end.status = RunCall(std::move(record), &call, [&]() -> absl::Status {
      if (tag.ready) TESSERA_RETURN_IF_ERROR(tag.ready());
      TESSERA_RETURN_IF_ERROR(RunWatched(call));
      end.result = StreamPoint::Now(device);
      return absl::OkStatus();
    });
    if (end.status.ok() && device.is_cpu()) return CommFuture();
    return DoneFuture(std::move(end));
  }
  CommPurpose purpose{tag.reason != WaitReason::kOther
                          ? tag.reason
                          : TraitsOf(record.op).waited_as,
                      record.what};
  CommThread::Work work = [self = shared_from_this(),
                           record = std::move(record),
                           call = std::make_shared<CommCall>(std::move(call)),
                           device, caller = CurrentStream(device),
                           after = StreamPoint::Now(device),
                           ready = std::move(tag.ready)]() {
    // Within the call: a device that has failed is the call's failure,
    // which the other ranks are told of.
    CommThread::End end;
    end.status = self->RunCall(record, call.get(), [&]() -> absl::Status {
      const OnCommStream scope(device, after, self->transport_->LaneOf(*call));
      if (ready) TESSERA_RETURN_IF_ERROR(ready());
      absl::Status status = self->RunWatched(*call);
      status.Update(CatchTorch(call->what, [&] { end.result = scope.Now(); }));
      return status;
    });
    if (!device.is_cpu()) {
      end.held = call;  // with its tensors
      end.caller = caller;
    }
    return end;
  };
  return CommThread::Get().Post(std::move(work), std::move(purpose));
}

absl::Status GroupCommunicator::RunCall(
    CollectiveRecord record, CommCall* call,
    const std::function<absl::Status()>& body) {
  absl::Status status = failure();
  if (!status.ok()) {
    recorder_.Leave(record.ticket, status);
    return status;
  }
  call->what = record.Title();
  call->sequence = record.sequence = ++sequence_;
  if (!in_call_) {  // alone there is nobody to agree with
    call->details = record.Describe();
    // What it is for too: two units may have the same size.
    call->signature = Hash31(
        absl::StrCat(call->sequence, " ", call->details, " ", call->what));
  }
  TESSERA_VLOG(comm, 2) << call->what << " #" << call->sequence;
  recorder_.Enter(record.ticket, record.sequence);
  record.entered = MonotonicNow();
  status = CatchTorch(call->what, body);
  const std::function<absl::Status()> end = transport_->TakeDeviceEnd();
  if (end == nullptr) return Note(std::move(record), std::move(status));
  if (!status.ok()) {
    FailOnDevice(status);
    return Note(std::move(record), std::move(status));
  }
  return WatchDevice(record, [this, call = TextsWithin(*call, "", nullptr),
                              end] { return AwaitDevice(call, end); });
}

absl::Status GroupCommunicator::RunWatched(const CommCall& call) {
  const auto run = [this](const CommCall& each) {
    if (!can_.waits) return transport_->Run(each);
    return Watched(&domain_->monitor(), each,
                   [&] { return transport_->Run(each); });
  };
  if (can_.device || call.device().is_cpu()) return run(call);
  CommCall host = call;
  if (call.in.defined()) host.in = call.in.cpu();
  host.out = call.in.defined() ? at::empty(call.out.sizes(), call.out.dtype())
                               : call.out.cpu();
  TESSERA_RETURN_IF_ERROR(run(host));
  if (call.writes_out()) call.out.copy_(host.out);
  return absl::OkStatus();
}

absl::Status GroupCommunicator::Watched(
    WaitMonitor* monitor, const CommCall& call,
    const std::function<absl::Status()>& body) {
  monitor->Begin({call.sequence, call.signature, call.what, call.details},
                 watched_);
  absl::Status status = CatchTorch(std::string(backend()).c_str(), body);
  if (absl::IsFailedPrecondition(status)) {
    status = WithTheCause(status);
  } else if (!status.ok()) {
    status = Annotate(status, call.what);
  }
  return monitor->End(status);
}

absl::Status GroupCommunicator::WithTheCause(const absl::Status& mismatch) {
  const Deadline until = Deadline::After(kCauseWait);
  do {
    const std::vector<Announcement> posted = domain_->announcements().Read();
    if (!posted.empty()) return posted.front().status;
    if (domain_->announcements().has_posted()) {
      return domain_->announcements().posted();
    }
    absl::SleepFor(absl::Milliseconds(10));
  } while (!until.HasPassed());
  return mismatch;
}

absl::Status GroupCommunicator::WatchDevice(const CollectiveRecord& record,
                                            std::function<absl::Status()> end) {
  // Without a thread for it this one waits.
  if (!CommThread::OfDevices().Start().ok()) {
    return Note(record, CatchTorch(record.what, end));
  }
  CommThread::OfDevices().Post([self = shared_from_this(),
                                record = CollectiveRecord(record),
                                end = std::move(end)]() mutable {
    record.entered = MonotonicNow();  // those before it have ended
    absl::Status status = CatchTorch(record.what, end);
    return self->Note(std::move(record), std::move(status));
  });
  return absl::OkStatus();
}

absl::Status GroupCommunicator::AwaitDevice(
    const CommCall& call, const std::function<absl::Status()>& end) {
  // What comes after a failure is not waited for: nobody will see its end.
  if (device_failed_) return failure();
  const absl::Status status = Watched(&domain_->device_monitor(), call, end);
  if (!status.ok()) FailOnDevice(status);
  return status;
}

// The group has failed before its streams go on with what is there then.
void GroupCommunicator::FailOnDevice(const absl::Status& why) {
  failure_->Set(why);
  device_failed_ = true;
  transport_->AbandonDevice(why);
}

absl::Status GroupCommunicator::Note(CollectiveRecord record,
                                     absl::Status status) {
  record.left = MonotonicNow();
  record.status = std::move(status);
  recorder_.Leave(record.ticket, record.status);
  log_->Add(record);
  if (!record.status.ok()) {
    failure_->Set(record.status);
    if (domain_ != nullptr) domain_->Announce(record.status, /*final=*/true);
  }
  return record.status;
}

}  // namespace tessera
