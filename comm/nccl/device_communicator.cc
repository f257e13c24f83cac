// Why the ranks agree before each collective: NCCL has no tags. It matches
// collectives by their order alone, so that two ranks which gather different
// units of one size would both go on, each with shards of both; of other kinds
// or sizes they would wait for ever. So the communication threads meet first,
// over the host group, which tells who is missing, or in what else, as it does
// for tensors of the CPU. What they then give to their devices matches.
//
// Why on the host: a word of the device's would come when the device has come
// so far, and somebody would have to wait for it there before the data may be
// used. The host is ahead of its device, mostly by some units; so the time of a
// meeting is none of the step's.
//
// What is left for the device's end: the device itself, the network between
// devices, and the end of a process in between.
//
// Why `abort` runs on a thread of its own: it waits for the backend's threads
// and for the device, where the collective is that could not be ended. The
// others have been told of the failure by then; but a process that is stuck
// here neither trains nor ends, and one that goes on would use memory that the
// device may still write.
#include "comm/nccl/device_communicator.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/system/process_end.h"
#include "base/thread/deadline.h"
#include "base/torch/divide.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/group/watched_communicator.h"
#include "comm/rendezvous/abandonable.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// How often the device is asked whether it has come to an end; ever more
// rarely, since nobody waits for the answer.
constexpr absl::Duration kFirstPoll = absl::Microseconds(20);
constexpr absl::Duration kLongestPoll = absl::Milliseconds(1);

class DeviceCommunicator : public WatchedCommunicator {
 public:
  DeviceCommunicator(const DeviceCommunicatorOptions& options,
                     std::shared_ptr<FailureDomain> domain,
                     std::shared_ptr<QueuedCommunicator> host,
                     c10::intrusive_ptr<c10d::Backend> backend,
                     std::shared_ptr<std::atomic<bool>> aborted)
      : WatchedCommunicator(
            options, std::move(domain), [aborted] { *aborted = true; },
            TensorsSeen::kAny),
        options_(options),
        host_(std::move(host)),
        backend_(std::move(backend)),
        aborted_(std::move(aborted)) {
    CountOnFrom(*host_);
  }

  absl::string_view backend() const override { return options_.backend; }
  // Ranks wait for each other on the host, before each collective.
  std::vector<absl::Duration> WaitedFor() const override {
    return host_->WaitedFor();
  }

  absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                           const at::Tensor& whole) override;
  absl::Status DoReduceScatter(const Call& call, const at::Tensor& whole,
                               const at::Tensor& shard,
                               double divisor) override;
  absl::Status DoAllReduceSum(const Call& call,
                              const at::Tensor& tensor) override;
  absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                           int root) override;
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override {
    return host_->DoAllGatherStrings(call, mine);
  }

 protected:
  Body TakeDeviceEnd(const absl::Status& status) override;

 private:
  // What a collective gave to the device.
  struct Given {
    bool any = false;                 // or a part of it
    std::vector<Work> works;          // the backend's
    std::shared_ptr<c10::Event> end;  // of all of it: sums follow the last work
  };

  // `give` gives to the device what is the collective's there, once the ranks
  // have agreed; `t` is of the device.
  absl::Status Give(const Call& call, const at::Tensor& t,
                    const std::function<void()>& give);
  // The current stream goes on after `work`.
  void Follow(Work work);
  void Gather(const at::Tensor& shard, const at::Tensor& whole);
  void Scatter(const at::Tensor& whole, const at::Tensor& shard,
               double divisor);
  void OrderedScatter(const at::Tensor& whole, const at::Tensor& shard,
                      double divisor);

  // On the thread that watches.
  absl::Status Await(const Call& call, const Given& given);
  absl::Status Poll(const Given& given) const;
  // The device may hold what will never end. The group has failed before its
  // streams go on with what is there then.
  void Abort(const absl::Status& why);

  const DeviceCommunicatorOptions options_;
  const std::shared_ptr<QueuedCommunicator> host_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<std::atomic<bool>> aborted_;
  Given given_;  // by the collective that runs
};

// ---- what devices are given

absl::Status DeviceCommunicator::Give(const Call& call, const at::Tensor& t,
                                      const std::function<void()>& give) {
  if (t.device() != options_.device) {
    return absl::InvalidArgumentError(absl::StrCat(
        call.what, ": expected a tensor of ", options_.device.str(),
        ", this rank's device, or of the CPU, got one of ", t.device().str()));
  }
  TESSERA_RETURN_IF_ERROR(host_->DoAllGatherStrings(call, "").status());
  if (*aborted_) return absl::CancelledError("the group has failed");
  given_.any = true;
  const auto give_all = [&] {
    give();
    given_.end = std::make_shared<c10::Event>(options_.device.type());
    given_.end->record(c10::impl::VirtualGuardImpl(options_.device.type())
                           .getStream(options_.device));
    return absl::OkStatus();
  };
  if (options_.on_agreed) {  // its backend meets by itself
    options_.on_agreed(call);
    return CatchTorch(options_.backend.c_str(), give_all);
  }
  return Watched(call, give_all);  // NCCL connects in the first
}

void DeviceCommunicator::Follow(Work work) {
  work->wait();
  given_.works.push_back(std::move(work));
}

void DeviceCommunicator::Gather(const at::Tensor& shard,
                                const at::Tensor& whole) {
  at::Tensor input = ElementsOver(shard, 0, shard.numel());
  at::Tensor output = ElementsOver(whole, 0, whole.numel());
  Follow(backend_->_allgather_base(output, input));
}

void DeviceCommunicator::Scatter(const at::Tensor& whole,
                                 const at::Tensor& shard, double divisor) {
  if (options_.ordered_sum) return OrderedScatter(whole, shard, divisor);
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor output = ElementsOver(shard, 0, shard.numel());
  Follow(backend_->_reduce_scatter_base(output, input));
  DivideBy(output, divisor);
}

// Slices are exchanged, a part of each at a time: the memory for the others' is
// the same whatever the size of a unit.
void DeviceCommunicator::OrderedScatter(const at::Tensor& whole,
                                        const at::Tensor& shard,
                                        double divisor) {
  const int64_t numel = shard.numel();
  const int64_t part = std::clamp<int64_t>(
      options_.slices_bytes / (world_size() * whole.element_size()), 1, numel);
  const at::Tensor slices = at::empty({world_size() * part}, whole.options());
  for (int64_t at = 0; at < numel; at += part) {
    const int64_t n = std::min(part, numel - at);
    std::vector<at::Tensor> sent, received;
    for (int r = 0; r < world_size(); ++r) {
      sent.push_back(ElementsOver(whole, r * numel + at, n));
      received.push_back(ElementsOver(slices, r * n, n));
    }
    Follow(backend_->alltoall(received, sent));
    ThrowIfError(options_.ordered_sum(ElementsOver(slices, 0, world_size() * n),
                                      divisor, ElementsOver(shard, at, n)));
  }
}

absl::Status DeviceCommunicator::DoAllGather(const Call& call,
                                             const at::Tensor& shard,
                                             const at::Tensor& whole) {
  if (whole.is_cpu()) return host_->DoAllGather(call, shard, whole);
  return Give(call, whole, [&] { Gather(shard, whole); });
}

absl::Status DeviceCommunicator::DoReduceScatter(const Call& call,
                                                 const at::Tensor& whole,
                                                 const at::Tensor& shard,
                                                 double divisor) {
  if (whole.is_cpu()) {
    return host_->DoReduceScatter(call, whole, shard, divisor);
  }
  return Give(call, whole, [&] { Scatter(whole, shard, divisor); });
}

absl::Status DeviceCommunicator::DoAllReduceSum(const Call& call,
                                                const at::Tensor& tensor) {
  if (tensor.is_cpu()) return host_->DoAllReduceSum(call, tensor);
  return Give(call, tensor, [&] {
    const int64_t numel = tensor.numel();
    const int64_t each = (numel + world_size() - 1) / world_size();
    const at::Tensor plain = ElementsOver(tensor, 0, numel);
    const at::Tensor padded = at::zeros({each * world_size()}, plain.options());
    padded.narrow(0, 0, numel).copy_(plain);
    const at::Tensor own = padded.narrow(0, rank() * each, each);
    Scatter(padded, own, /*divisor=*/1);
    Gather(own, padded);
    plain.copy_(padded.narrow(0, 0, numel));
  });
}

absl::Status DeviceCommunicator::DoBroadcast(const Call& call,
                                             const at::Tensor& tensor,
                                             int root) {
  if (tensor.is_cpu()) return host_->DoBroadcast(call, tensor, root);
  return Give(call, tensor, [&] {
    std::vector<at::Tensor> tensors{ElementsOver(tensor, 0, tensor.numel())};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    Follow(backend_->broadcast(tensors, options));
  });
}

// ---- their ends

QueuedCommunicator::Body DeviceCommunicator::TakeDeviceEnd(
    const absl::Status& status) {
  Given given = std::exchange(given_, {});
  if (!given.any) return nullptr;
  if (!status.ok()) {
    Abort(status);
    return nullptr;
  }
  return [this, given = std::move(given)](const Call& call) {
    return Await(call, given);
  };
}

absl::Status DeviceCommunicator::Await(const Call& call, const Given& given) {
  // This thread's for good, as in comm/group/comm_stream.cc.
  c10::impl::VirtualGuardImpl(options_.device.type())
      .setDevice(options_.device);
  // What comes after a failure is not waited for: nobody will see its end.
  if (*aborted_) return failure();
  const absl::Status status =
      WatchedBy(&domain()->device_monitor(), call, [&] { return Poll(given); });
  if (!status.ok()) Abort(status);
  return status;
}

absl::Status DeviceCommunicator::Poll(const Given& given) const {
  absl::Duration pause = kFirstPoll;
  const auto wait_until = [&](const std::function<bool()>& done) {
    while (!done()) {
      if (*aborted_) return absl::CancelledError("the wait was aborted");
      absl::SleepFor(pause);
      pause = std::min(2 * pause, kLongestPoll);
    }
    return absl::OkStatus();
  };
  for (const Work& work : given.works) {
    TESSERA_RETURN_IF_ERROR(wait_until([&] { return work->isCompleted(); }));
    if (std::exception_ptr error = work->exception()) {
      std::rethrow_exception(error);
    }
  }
  return wait_until([&] { return given.end->query(); });
}

void DeviceCommunicator::Abort(const absl::Status& why) {
  *aborted_ = true;
  domain()->failure()->Set(why);
  const Deadline deadline = Deadline::After(options_.abort_patience);
  const absl::Status ended = RunAbandonable(
      [backend = backend_, name = options_.backend]() mutable {
        // The error is told already; what abort says adds nothing.
        (void)CatchTorch(name.c_str(), [&] { backend->abort(); });
        (void)backend.release();  // its destructor could wait for what is stuck
        return absl::OkStatus();
      },
      [&] {
        return deadline.HasPassed() ? absl::DeadlineExceededError("")
                                    : absl::OkStatus();
      });
  if (ended.ok()) return;
  TESSERA_LOG(ERROR) << why.message() << "; " << options_.backend
                     << " cannot be aborted ("
                     << (absl::IsDeadlineExceeded(ended)
                             ? absl::StrCat(absl::FormatDuration(
                                                options_.abort_patience),
                                            " have passed")
                             : std::string(ended.message()))
                     << "), so this process ends";
  EndProcess(ProcessEnd::kStuck, 1);
}

}  // namespace

void AddSlices(const at::Tensor& slices, double divisor,
               const at::Tensor& sum) {
  const int64_t numel = sum.numel();
  const bool narrow = at::isReducedFloatingType(sum.scalar_type());
  at::Tensor total = ElementsOver(slices, 0, numel);
  total = narrow ? total.to(at::kFloat) : total.clone();
  for (int64_t at = numel; at < slices.numel(); at += numel) {
    total.add_(ElementsOver(slices, at, numel));
  }
  const at::Tensor target = ElementsOver(sum, 0, numel);
  target.copy_(total);
  DivideBy(target, divisor);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceCommunicator(
    const DeviceCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    std::shared_ptr<QueuedCommunicator> host,
    c10::intrusive_ptr<c10d::Backend> backend) {
  TESSERA_RETURN_IF_ERROR(domain->device_monitor().watching());
  return std::shared_ptr<Communicator>(std::make_shared<DeviceCommunicator>(
      options, std::move(domain), std::move(host), std::move(backend),
      std::make_shared<std::atomic<bool>>(false)));
}

}  // namespace tessera
