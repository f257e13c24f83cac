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
// Why two lanes cannot wait for each other: what a collective waits for on its
// own device was given there before it, and on other devices it is the same
// collective, which has been given by the hosts in the same order. A device
// that lacks room for two at once must start them in the order of the hosts, as
// NCCL does (comm/nccl/nccl_environment.h): then a sum does not wait for a
// gather's end, but for its beginning.
//
// What is left for the device's end: the device itself, the network between
// devices, and the end of a process in between.
//
// Why all backends of the domain are aborted with the one whose work failed:
// what the others have given to the device waits for ranks that come no more.
// The ranks have been told of the failure by then; but a process that is stuck
// in an abort neither trains nor ends, and one that goes on would use memory
// that the device may still write.
#include "comm/device/device_transport.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/system/process_end.h"
#include "base/torch/divide.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/device/open_backend.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// How often the device is asked whether it has come to an end; ever more
// rarely, since nobody waits for the answer.
constexpr absl::Duration kFirstPoll = absl::Microseconds(20);
constexpr absl::Duration kLongestPoll = absl::Milliseconds(1);

class DeviceTransport : public Transport {
 public:
  DeviceTransport(const DeviceTransportOptions& options,
                  std::shared_ptr<Transport> host,
                  c10::intrusive_ptr<c10d::Backend> backend,
                  c10::intrusive_ptr<c10d::Backend> sums)
      : options_(options),
        host_(std::move(host)),
        aborted_(std::make_shared<std::atomic<bool>>(false)) {
    AddLane("", std::move(backend));
    if (sums != nullptr) AddLane(" for sums", std::move(sums));
  }
  // Any thread may come here, so nobody waits for the backends' ends.
  ~DeviceTransport() override {
    for (const auto& lane : lanes_) lane->Drop();
  }

  absl::string_view name() const override { return options_.backend; }
  Capabilities capabilities() const override {
    Capabilities can;
    can.device = true;
    can.sums_in_rank_order = options_.ordered_sum != nullptr;
    return can;
  }
  // Ranks wait for each other on the host, before each collective.
  void Listen(WaitListener listener) override {
    awaited_ = listener.awaited;
    for (const auto& lane : lanes_) lane->Listen(listener.failure);
    host_->Listen(std::move(listener));
  }
  absl::Status Run(const CommCall& call) override;
  void Abort() override {
    *aborted_ = true;
    host_->Abort();
  }
  int LaneOf(const CommCall& call) const override {
    const bool sums = call.op == CollectiveOp::kReduceScatter ||
                      call.op == CollectiveOp::kAllReduce;
    return sums ? static_cast<int>(lanes_.size()) - 1 : 0;
  }
  std::function<absl::Status()> TakeDeviceEnd() override;
  void AbandonDevice(const absl::Status& why) override;

 private:
  // What a collective gave to the device.
  struct Given {
    bool any = false;  // or a part of it
    std::shared_ptr<OpenBackend> lane;
    std::vector<Work> works;          // the backend's
    std::shared_ptr<c10::Event> end;  // of all of it: sums follow the last work
  };

  void AddLane(const std::string& name,
               c10::intrusive_ptr<c10d::Backend> backend) {
    lanes_.push_back(OpenBackend::Add(
        {absl::StrCat(options_.backend, name, " of rank ", options_.rank,
                      " of ", options_.world_size, " on ",
                      options_.device.str()),
         options_.device, options_.abort_patience},
        std::move(backend)));
  }
  // Gives to the device what is the collective's there.
  void Give(const CommCall& call);
  // The current stream goes on after `work`.
  void Follow(Work work);
  void Gather(const at::Tensor& shard, const at::Tensor& whole);
  void Scatter(const at::Tensor& whole, const at::Tensor& shard,
               double divisor);
  void ScatterInOrder(const at::Tensor& whole, const at::Tensor& shard,
                      double divisor);
  void AllReduce(const at::Tensor& tensor);
  void Broadcast(const at::Tensor& tensor, int root);
  void Move(const CommCall& call);
  // On the thread that watches.
  absl::Status Await(const Given& given) const;

  const DeviceTransportOptions options_;
  const std::shared_ptr<Transport> host_;
  std::vector<std::shared_ptr<OpenBackend>> lanes_;
  const std::shared_ptr<std::atomic<bool>> aborted_;
  std::function<void(int)> awaited_;
  Given given_;  // by the collective that runs
};

// ---- what devices are given

absl::Status DeviceTransport::Run(const CommCall& call) {
  if (call.device().is_cpu()) return host_->Run(call);
  if (call.device() != options_.device) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a tensor of ", options_.device.str(),
                     ", this rank's device, or of the CPU, got one of ",
                     call.device().str()));
  }
  const std::shared_ptr<OpenBackend>& lane = lanes_[LaneOf(call)];
  if (lane->ending()) {
    return absl::CancelledError(
        absl::StrCat(options_.backend,
                     " is closed: Shutdown was called, or a group of "
                     "these ranks has failed"));
  }
  std::vector<std::string> ignored;
  TESSERA_RETURN_IF_ERROR(host_->Run(TextsWithin(call, "", &ignored)));
  awaited_(-1);
  if (*aborted_) return absl::CancelledError("the group has failed");
  given_.any = true;
  given_.lane = lane;
  if (options_.on_agreed) options_.on_agreed(call);  // it meets by itself
  Give(call);
  given_.end = std::make_shared<c10::Event>(options_.device.type());
  given_.end->record(c10::impl::VirtualGuardImpl(options_.device.type())
                         .getStream(options_.device));
  return absl::OkStatus();
}

void DeviceTransport::Give(const CommCall& call) {
  switch (call.op) {
    case CollectiveOp::kAllGather:
      return Gather(call.in, call.out);
    case CollectiveOp::kReduceScatter:
      return Scatter(call.in, call.out, call.divisor);
    case CollectiveOp::kAllReduce:
      return AllReduce(call.out);
    case CollectiveOp::kBroadcast:
      return Broadcast(call.out, call.root);
    default:
      return Move(call);
  }
}

void DeviceTransport::Follow(Work work) {
  work->wait();
  given_.works.push_back(std::move(work));
}

void DeviceTransport::Gather(const at::Tensor& shard, const at::Tensor& whole) {
  at::Tensor input = ElementsOver(shard, 0, shard.numel());
  at::Tensor output = ElementsOver(whole, 0, whole.numel());
  Follow(given_.lane->get()->_allgather_base(output, input));
}

void DeviceTransport::Scatter(const at::Tensor& whole, const at::Tensor& shard,
                              double divisor) {
  if (options_.ordered_sum) return ScatterInOrder(whole, shard, divisor);
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor output = ElementsOver(shard, 0, shard.numel());
  Follow(given_.lane->get()->_reduce_scatter_base(output, input));
  DivideBy(output, divisor);
}

// Slices are exchanged, a part of each at a time: the memory for the others' is
// the same whatever the size of a unit.
void DeviceTransport::ScatterInOrder(const at::Tensor& whole,
                                     const at::Tensor& shard, double divisor) {
  const int64_t numel = shard.numel();
  const int64_t part = std::clamp<int64_t>(
      options_.slices_bytes / (options_.world_size * whole.element_size()), 1,
      numel);
  const at::Tensor slices =
      at::empty({options_.world_size * part}, whole.options());
  for (int64_t at = 0; at < numel; at += part) {
    const int64_t n = std::min(part, numel - at);
    std::vector<at::Tensor> sent, received;
    for (int r = 0; r < options_.world_size; ++r) {
      sent.push_back(ElementsOver(whole, r * numel + at, n));
      received.push_back(ElementsOver(slices, r * n, n));
    }
    Follow(given_.lane->get()->alltoall(received, sent));
    ThrowIfError(
        options_.ordered_sum(ElementsOver(slices, 0, options_.world_size * n),
                             divisor, ElementsOver(shard, at, n)));
  }
}

void DeviceTransport::AllReduce(const at::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  const int64_t each = (numel + options_.world_size - 1) / options_.world_size;
  const at::Tensor plain = ElementsOver(tensor, 0, numel);
  const at::Tensor padded =
      at::zeros({each * options_.world_size}, plain.options());
  padded.narrow(0, 0, numel).copy_(plain);
  const at::Tensor own = padded.narrow(0, options_.rank * each, each);
  Scatter(padded, own, /*divisor=*/1);
  Gather(own, padded);
  plain.copy_(padded.narrow(0, 0, numel));
}

void DeviceTransport::Broadcast(const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{ElementsOver(tensor, 0, tensor.numel())};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  Follow(given_.lane->get()->broadcast(tensors, options));
}

// An empty part is not sent. A backend may have to know how long the others'
// are: a rank that has none copies one to itself.
void DeviceTransport::Move(const CommCall& call) {
  MovedParts parts = PartsOf(call, options_.world_size);
  if (call.op == CollectiveOp::kSendReceive && call.to < 0 && call.from < 0) {
    parts.sent[options_.rank] = ElementsOver(call.in, 0, call.in.numel());
    parts.received[options_.rank] = at::empty_like(call.in);
  }
  const at::Tensor none = at::empty({0}, call.in.options());
  for (auto* list : {&parts.sent, &parts.received}) {
    for (at::Tensor& part : *list) {
      if (!part.defined()) part = none;
    }
  }
  Follow(given_.lane->get()->alltoall(parts.received, parts.sent));
}

// ---- their ends

std::function<absl::Status()> DeviceTransport::TakeDeviceEnd() {
  Given given = std::exchange(given_, {});
  if (!given.any) return nullptr;
  return [this, given = std::move(given)] { return Await(given); };
}

absl::Status DeviceTransport::Await(const Given& given) const {
  // This thread's for good, as in comm/group/comm_stream.cc.
  c10::impl::VirtualGuardImpl(options_.device.type())
      .setDevice(options_.device);
  absl::Duration pause = kFirstPoll;
  const auto wait_until = [&](const std::function<bool()>& done) {
    while (!done()) {
      if (*aborted_ || given.lane->ending()) {
        return absl::CancelledError("the wait was aborted");
      }
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

void DeviceTransport::AbandonDevice(const absl::Status& why) {
  *aborted_ = true;
  const absl::Status ended = AbandonFailedBackends();  // of this domain
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

std::shared_ptr<Transport> MakeDeviceTransport(
    const DeviceTransportOptions& options, std::shared_ptr<Transport> host,
    c10::intrusive_ptr<c10d::Backend> backend,
    c10::intrusive_ptr<c10d::Backend> sums) {
  return std::make_shared<DeviceTransport>(options, std::move(host),
                                           std::move(backend), std::move(sums));
}

}  // namespace tessera
