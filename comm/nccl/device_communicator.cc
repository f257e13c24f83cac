// Why the ranks tell each other what they are in: NCCL has no tags. It matches
// collectives by their order alone, so that two ranks which gather different
// units of one size would both go on, each with shards of both. A collective
// that differs in kind or size mostly waits for ever, which the monitor ends;
// one of the same kind and size nothing would notice.
//
// Why beside the collective and not before it: a message of 256 bytes takes as
// long as one of 8, some 10 us of the network's time, but a rank that waited
// for it first would wait twice in each collective, which for a small unit
// doubles its time. So both are under way together, and no rank returns OK
// before it has read the others' words. What the collective has written by then
// is lost with the group.
//
// Why `abort` runs on a thread of its own: it waits for the backend's threads
// and for the device, where the collective is that could not be ended. The
// others have been told of the failure by then; but a process that is stuck
// here neither trains nor ends, and one that goes on would use memory that the
// device may still write.
#include "comm/nccl/device_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "comm/group/comm_stream.h"
#include "comm/group/watched_communicator.h"
#include "comm/rendezvous/abandonable.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

constexpr absl::Duration kPoll = absl::Microseconds(20);

// What a rank says of the collective that it is in.
struct Word {
  int64_t signature = 0;  // of Call
  char text[248] = {};    // the call, cut off; ends with a zero byte
};

class DeviceCommunicator : public WatchedCommunicator {
 public:
  DeviceCommunicator(const DeviceCommunicatorOptions& options,
                     std::shared_ptr<FailureDomain> domain,
                     c10::intrusive_ptr<c10d::Backend> backend,
                     std::shared_ptr<std::atomic<bool>> aborted)
      : WatchedCommunicator(
            options, std::move(domain), [aborted] { *aborted = true; },
            TensorsSeen::kAny),
        device_(options.device),
        name_(options.backend),
        ordered_sum_(options.ordered_sum),
        abort_patience_(options.abort_patience),
        backend_(std::move(backend)),
        aborted_(std::move(aborted)) {}

  absl::string_view backend() const override { return name_; }

 protected:
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
      const Call& call, const std::string& mine) override;

 private:
  // The ranks' words about the collective under way.
  struct Agreement {
    Word mine;
    // On the device: this rank's, which is read until all are there, and all.
    at::Tensor sent, words;
    Work work;  // null: they have been read
  };

  // Runs `body` under the monitor, with this rank's device and communication
  // stream current; what that stream does next sees its results.
  absl::Status OnDevice(const Call& call,
                        const std::function<absl::Status()>& body);
  void StartAgreement(const Call& call);
  // REQUIRES: the words are there.
  absl::Status ReadAgreement();
  // All in the same collective?
  absl::Status Compare(const std::vector<Word>& words) const;
  // Waits for the words if they have not been read.
  absl::Status EndAgreement();
  absl::Status WaitFor(const Work& work);
  absl::Status ResultOf(const Work& work) const;
  void Abort(const absl::Status& why);
  // The tensor itself if it is on the device, a copy there otherwise.
  at::Tensor OnOwn(const at::Tensor& t) const { return t.to(device_); }
  Work StartGather(const at::Tensor& shard, const at::Tensor& whole);
  absl::Status Gather(const at::Tensor& shard, const at::Tensor& whole) {
    return WaitFor(StartGather(shard, whole));
  }
  absl::Status Scatter(const at::Tensor& whole, const at::Tensor& shard,
                       double divisor);
  absl::Status OrderedScatter(const at::Tensor& whole, const at::Tensor& shard,
                              double divisor);

  const at::Device device_;
  const std::string name_;
  const std::function<absl::Status(const at::Tensor&, double,
                                   const at::Tensor&)>
      ordered_sum_;
  const absl::Duration abort_patience_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<std::atomic<bool>> aborted_;
  Agreement agreement_;
};

// ---- waits

absl::Status DeviceCommunicator::ResultOf(const Work& work) const {
  if (std::exception_ptr error = work->exception()) {
    return CatchTorch(name_, [&] { std::rethrow_exception(error); });
  }
  return CatchTorch(name_, [&] { work->wait(); });
}

// The words come first, mostly: a collective that no rank can end is not waited
// for once it is known to be another one's.
absl::Status DeviceCommunicator::WaitFor(const Work& work) {
  while (!work->isCompleted()) {
    if (*aborted_) return absl::CancelledError("the wait was aborted");
    if (agreement_.work != nullptr && agreement_.work->isCompleted()) {
      TESSERA_RETURN_IF_ERROR(ReadAgreement());
    }
    absl::SleepFor(kPoll);
  }
  return ResultOf(work);
}

absl::Status DeviceCommunicator::OnDevice(
    const Call& call, const std::function<absl::Status()>& body) {
  absl::Status status = Watched(call, [&]() -> absl::Status {
    // Texts and tensors of the CPU are of no device, but take ours.
    const OnCommStream scope(device_, StreamPoint());
    StartAgreement(call);
    TESSERA_RETURN_IF_ERROR(body());
    return EndAgreement();
  });
  if (!status.ok()) Abort(status);
  return status;
}

void DeviceCommunicator::Abort(const absl::Status& why) {
  const absl::Time deadline = absl::Now() + abort_patience_;
  const absl::Status ended = RunAbandonable(
      [backend = backend_, name = name_]() mutable {
        // The error is told already; what abort says adds nothing.
        (void)CatchTorch(name, [&] { backend->abort(); });
        (void)backend.release();  // as below
        return absl::OkStatus();
      },
      [&] {
        return absl::Now() < deadline ? absl::OkStatus()
                                      : absl::DeadlineExceededError("");
      });
  (void)backend_.release();  // its destructor could wait for what is stuck
  if (ended.ok()) return;
  TESSERA_LOG(ERROR) << why.message() << "; " << name_ << " cannot be aborted ("
                     << (absl::IsDeadlineExceeded(ended)
                             ? absl::StrCat(
                                   absl::FormatDuration(abort_patience_),
                                   " have passed")
                             : std::string(ended.message()))
                     << "), so this process ends";
  _exit(1);
}

// ---- what the ranks are in

void DeviceCommunicator::StartAgreement(const Call& call) {
  if (world_size() == 1) return;
  agreement_.mine = Word();
  agreement_.mine.signature = call.signature;
  const std::string text =
      absl::StrCat(call.what, " #", call.sequence, " (", call.details, ")");
  text.copy(agreement_.mine.text, sizeof(agreement_.mine.text) - 1);
  agreement_.sent = OnOwn(BytesOver(&agreement_.mine, sizeof(Word)));
  agreement_.words =
      at::empty({world_size() * static_cast<int64_t>(sizeof(Word))},
                agreement_.sent.options());
  agreement_.work = StartGather(agreement_.sent, agreement_.words);
}

absl::Status DeviceCommunicator::ReadAgreement() {
  const Work work = std::exchange(agreement_.work, nullptr);
  TESSERA_RETURN_IF_ERROR(ResultOf(work));
  const at::Tensor host = agreement_.words.cpu();
  std::vector<Word> words(world_size());
  std::memcpy(words.data(), host.const_data_ptr(), host.nbytes());
  return Compare(words);
}

absl::Status DeviceCommunicator::Compare(const std::vector<Word>& words) const {
  for (int r = 0; r < world_size(); ++r) {
    if (words[r].signature == agreement_.mine.signature) continue;
    const size_t shown = strnlen(words[r].text, sizeof(words[r].text) - 1);
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: rank ", names()[rank()],
        " in ", agreement_.mine.text, ", rank ", names()[r], " in ",
        absl::string_view(words[r].text, shown),
        "; all ranks must run the same units in the same order, and as many "
        "batches: see Engine::AnyRankHasData"));
  }
  return absl::OkStatus();
}

absl::Status DeviceCommunicator::EndAgreement() {
  if (agreement_.work == nullptr) return absl::OkStatus();
  while (!agreement_.work->isCompleted()) {
    if (*aborted_) return absl::CancelledError("the wait was aborted");
    absl::SleepFor(kPoll);
  }
  return ReadAgreement();
}

// ---- collectives

Work DeviceCommunicator::StartGather(const at::Tensor& shard,
                                     const at::Tensor& whole) {
  at::Tensor input = ElementsOver(shard, 0, shard.numel());
  at::Tensor output = ElementsOver(whole, 0, whole.numel());
  return backend_->_allgather_base(output, input);
}

absl::Status DeviceCommunicator::Scatter(const at::Tensor& whole,
                                         const at::Tensor& shard,
                                         double divisor) {
  if (ordered_sum_) return OrderedScatter(whole, shard, divisor);
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor output = ElementsOver(shard, 0, shard.numel());
  TESSERA_RETURN_IF_ERROR(
      WaitFor(backend_->_reduce_scatter_base(output, input)));
  Divide(output, divisor);
  return absl::OkStatus();
}

absl::Status DeviceCommunicator::OrderedScatter(const at::Tensor& whole,
                                                const at::Tensor& shard,
                                                double divisor) {
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor slices = at::empty_like(input);
  std::vector<int64_t> equal;
  TESSERA_RETURN_IF_ERROR(
      WaitFor(backend_->alltoall_base(slices, input, equal, equal)));
  return ordered_sum_(slices, divisor, ElementsOver(shard, 0, shard.numel()));
}

absl::Status DeviceCommunicator::DoAllGather(const Call& call,
                                             const at::Tensor& shard,
                                             const at::Tensor& whole) {
  return OnDevice(call, [&]() -> absl::Status {
    at::Tensor output =
        whole.device() == device_
            ? whole
            : at::empty(whole.sizes(), whole.options().device(device_));
    TESSERA_RETURN_IF_ERROR(Gather(OnOwn(shard), output));
    if (whole.device() != device_) {
      ElementsOver(whole, 0, whole.numel()).copy_(output.view(-1));
    }
    return absl::OkStatus();
  });
}

absl::Status DeviceCommunicator::DoReduceScatter(const Call& call,
                                                 const at::Tensor& whole,
                                                 const at::Tensor& shard,
                                                 double divisor) {
  return OnDevice(call, [&]() -> absl::Status {
    at::Tensor output = OnOwn(shard);
    TESSERA_RETURN_IF_ERROR(Scatter(OnOwn(whole), output, divisor));
    if (shard.device() != device_) {
      ElementsOver(shard, 0, shard.numel()).copy_(output.view(-1));
    }
    return absl::OkStatus();
  });
}

absl::Status DeviceCommunicator::DoAllReduceSum(const Call& call,
                                                const at::Tensor& tensor) {
  return OnDevice(call, [&]() -> absl::Status {
    const int64_t numel = tensor.numel();
    const int64_t each = (numel + world_size() - 1) / world_size();
    at::Tensor plain = ElementsOver(tensor, 0, numel);
    at::Tensor padded =
        at::zeros({each * world_size()}, plain.options().device(device_));
    padded.narrow(0, 0, numel).copy_(plain);
    at::Tensor own = padded.narrow(0, rank() * each, each);
    TESSERA_RETURN_IF_ERROR(Scatter(padded, own, /*divisor=*/1));
    TESSERA_RETURN_IF_ERROR(Gather(own, padded));
    plain.copy_(padded.narrow(0, 0, numel));
    return absl::OkStatus();
  });
}

absl::Status DeviceCommunicator::DoBroadcast(const Call& call,
                                             const at::Tensor& tensor,
                                             int root) {
  return OnDevice(call, [&]() -> absl::Status {
    at::Tensor plain = ElementsOver(tensor, 0, tensor.numel());
    std::vector<at::Tensor> tensors{OnOwn(plain)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    TESSERA_RETURN_IF_ERROR(WaitFor(backend_->broadcast(tensors, options)));
    if (plain.device() != device_) plain.copy_(tensors[0]);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<std::string>> DeviceCommunicator::DoAllGatherStrings(
    const Call& call, const std::string& mine) {
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
  std::vector<std::string> texts(world_size());
  TESSERA_RETURN_IF_ERROR(OnDevice(call, [&]() -> absl::Status {
    at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()),
                                 bytes.dtype(at::kLong));
    at::Tensor lengths = at::empty({world_size()}, bytes.dtype(at::kLong));
    TESSERA_RETURN_IF_ERROR(Gather(length, lengths));
    // In another collective a rank's bytes would be no lengths.
    TESSERA_RETURN_IF_ERROR(EndAgreement());
    lengths = lengths.cpu();
    const int64_t longest = lengths.max().item<int64_t>();
    if (longest == 0) return absl::OkStatus();
    at::Tensor record = at::zeros({longest}, at::kByte);
    std::memcpy(record.mutable_data_ptr(), mine.data(), mine.size());
    at::Tensor records = at::empty({world_size() * longest}, bytes);
    TESSERA_RETURN_IF_ERROR(Gather(OnOwn(record), records));
    records = records.cpu();
    for (int r = 0; r < world_size(); ++r) {
      texts[r].assign(
          static_cast<const char*>(records.const_data_ptr()) + r * longest,
          lengths[r].item<int64_t>());
    }
    return absl::OkStatus();
  }));
  return texts;
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
  if (divisor != 1) target.div_(divisor);
}

std::shared_ptr<Communicator> MakeDeviceCommunicator(
    const DeviceCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_shared<DeviceCommunicator>(
      options, std::move(domain), std::move(backend),
      std::make_shared<std::atomic<bool>>(false));
}

}  // namespace tessera
