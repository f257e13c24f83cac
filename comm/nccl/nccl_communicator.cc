#include "comm/nccl/nccl_communicator.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAGuard.h"
#include "c10/cuda/CUDAStream.h"
#include "comm/group/watched_communicator.h"
#include "comm/reduce/ordered_sum.h"

// The only file that sees c10d's NCCL header.
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"

namespace tessera {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// Waits are ended by our own monitor; NCCL's timeout must never come first.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);
constexpr absl::Duration kPoll = absl::Microseconds(20);

class NcclCommunicator : public WatchedCommunicator {
 public:
  NcclCommunicator(const NcclCommunicatorOptions& options,
                   std::shared_ptr<FailureDomain> domain,
                   c10::intrusive_ptr<c10d::ProcessGroupNCCL> group,
                   std::shared_ptr<std::atomic<bool>> aborted)
      : WatchedCommunicator(
            options, std::move(domain), [aborted] { *aborted = true; },
            TensorsSeen::kAny),
        device_(at::kCUDA, static_cast<c10::DeviceIndex>(options.device)),
        ordered_sums_(options.ordered_sums),
        group_(std::move(group)),
        aborted_(std::move(aborted)) {}

  absl::string_view backend() const override { return "nccl"; }

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
  // Runs `body` with this rank's GPU current, under the monitor; its results
  // are there when this returns OK.
  absl::Status OnDevice(const Call& call,
                        const std::function<absl::Status()>& body);
  absl::Status WaitFor(const Work& work);
  // The tensor itself if it is on the GPU, a copy there otherwise.
  at::Tensor OnGpu(const at::Tensor& t) const { return t.to(device_); }
  absl::Status Gather(const at::Tensor& shard, at::Tensor whole);
  absl::Status Scatter(const at::Tensor& whole, at::Tensor shard);
  absl::Status OrderedScatter(const at::Tensor& whole, at::Tensor shard);

  const at::Device device_;
  const bool ordered_sums_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  const std::shared_ptr<std::atomic<bool>> aborted_;
};

absl::Status NcclCommunicator::WaitFor(const Work& work) {
  while (!work->isCompleted()) {
    if (*aborted_) return absl::CancelledError("the wait was aborted");
    absl::SleepFor(kPoll);
  }
  if (std::exception_ptr error = work->exception()) {
    return CatchTorch("nccl", [&] { std::rethrow_exception(error); });
  }
  return CatchTorch("nccl", [&] { work->wait(); });
}

absl::Status NcclCommunicator::OnDevice(
    const Call& call, const std::function<absl::Status()>& body) {
  absl::Status status = Watched(call, [&]() -> absl::Status {
    c10::cuda::CUDAGuard guard(device_);
    TESSERA_RETURN_IF_ERROR(body());
    c10::cuda::getCurrentCUDAStream().synchronize();
    return absl::OkStatus();
  });
  if (!status.ok()) {
    // The error is told already; what abort says adds nothing.
    (void)CatchTorch("nccl", [&] { group_->abort(); });
    (void)group_.release();  // its destructor could wait for what is stuck
  }
  return status;
}

absl::Status NcclCommunicator::Gather(const at::Tensor& shard,
                                      at::Tensor whole) {
  at::Tensor input = ElementsOver(shard, 0, shard.numel());
  at::Tensor output = ElementsOver(whole, 0, whole.numel());
  return WaitFor(group_->_allgather_base(output, input));
}

absl::Status NcclCommunicator::Scatter(const at::Tensor& whole,
                                       at::Tensor shard) {
  if (ordered_sums_) return OrderedScatter(whole, shard);
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor output = ElementsOver(shard, 0, shard.numel());
  return WaitFor(group_->_reduce_scatter_base(output, input));
}

absl::Status NcclCommunicator::OrderedScatter(const at::Tensor& whole,
                                              at::Tensor shard) {
  at::Tensor input = ElementsOver(whole, 0, whole.numel());
  at::Tensor slices = at::empty_like(input);
  std::vector<int64_t> equal;
  TESSERA_RETURN_IF_ERROR(
      WaitFor(group_->alltoall_base(slices, input, equal, equal)));
  const int64_t numel = shard.numel();
  void* const stream = c10::cuda::getCurrentCUDAStream().stream();
  int error = 0;
  if (shard.scalar_type() == at::kFloat) {
    error = OrderedSumCuda(slices.const_data_ptr<float>(), world_size(), numel,
                           shard.mutable_data_ptr<float>(), stream);
  } else if (shard.scalar_type() == at::kDouble) {
    error = OrderedSumCuda(slices.const_data_ptr<double>(), world_size(), numel,
                           shard.mutable_data_ptr<double>(), stream);
  } else {
    at::Tensor sum = ElementsOver(slices, 0, numel);
    for (int r = 1; r < world_size(); ++r) {
      sum.add_(ElementsOver(slices, r * numel, numel));
    }
    ElementsOver(shard, 0, numel).copy_(sum);
  }
  if (error != 0) {
    return absl::InternalError(absl::StrCat(
        "ordered sum: ", cudaGetErrorString(static_cast<cudaError_t>(error))));
  }
  // `slices` is freed to this stream's pool; all work on it is on this stream.
  c10::cuda::getCurrentCUDAStream().synchronize();
  return absl::OkStatus();
}

absl::Status NcclCommunicator::DoAllGather(const Call& call,
                                           const at::Tensor& shard,
                                           const at::Tensor& whole) {
  return OnDevice(call, [&]() -> absl::Status {
    at::Tensor output =
        whole.is_cuda()
            ? whole
            : at::empty(whole.sizes(), whole.options().device(device_));
    TESSERA_RETURN_IF_ERROR(Gather(OnGpu(shard), output));
    if (!whole.is_cuda()) {
      ElementsOver(whole, 0, whole.numel()).copy_(output.view(-1));
    }
    return absl::OkStatus();
  });
}

absl::Status NcclCommunicator::DoReduceScatter(const Call& call,
                                               const at::Tensor& whole,
                                               const at::Tensor& shard,
                                               double divisor) {
  TESSERA_RETURN_IF_ERROR(OnDevice(call, [&]() -> absl::Status {
    at::Tensor output = OnGpu(shard);
    TESSERA_RETURN_IF_ERROR(Scatter(OnGpu(whole), output));
    if (!shard.is_cuda()) {
      ElementsOver(shard, 0, shard.numel()).copy_(output.view(-1));
    }
    return absl::OkStatus();
  }));
  Divide(shard, divisor);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::DoAllReduceSum(const Call& call,
                                              const at::Tensor& tensor) {
  return OnDevice(call, [&]() -> absl::Status {
    const int64_t numel = tensor.numel();
    const int64_t each = (numel + world_size() - 1) / world_size();
    at::Tensor plain = ElementsOver(tensor, 0, numel);
    at::Tensor padded =
        at::zeros({each * world_size()}, plain.options().device(device_));
    padded.narrow(0, 0, numel).copy_(plain);
    at::Tensor own = padded.narrow(0, rank() * each, each);
    c10::cuda::getCurrentCUDAStream().synchronize();
    TESSERA_RETURN_IF_ERROR(Scatter(padded, own));
    TESSERA_RETURN_IF_ERROR(Gather(own, padded));
    plain.copy_(padded.narrow(0, 0, numel));
    return absl::OkStatus();
  });
}

absl::Status NcclCommunicator::DoBroadcast(const Call& call,
                                           const at::Tensor& tensor, int root) {
  return OnDevice(call, [&]() -> absl::Status {
    at::Tensor plain = ElementsOver(tensor, 0, tensor.numel());
    std::vector<at::Tensor> tensors{OnGpu(plain)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    TESSERA_RETURN_IF_ERROR(WaitFor(group_->broadcast(tensors, options)));
    if (!plain.is_cuda()) plain.copy_(tensors[0]);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<std::string>> NcclCommunicator::DoAllGatherStrings(
    const Call& call, const std::string& mine) {
  const auto bytes_on_gpu =
      at::TensorOptions().dtype(at::kByte).device(device_);
  std::vector<std::string> texts(world_size());
  TESSERA_RETURN_IF_ERROR(OnDevice(call, [&]() -> absl::Status {
    at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()),
                                 bytes_on_gpu.dtype(at::kLong));
    at::Tensor lengths =
        at::empty({world_size()}, bytes_on_gpu.dtype(at::kLong));
    c10::cuda::getCurrentCUDAStream().synchronize();
    TESSERA_RETURN_IF_ERROR(Gather(length, lengths));
    lengths = lengths.cpu();
    const int64_t longest = lengths.max().item<int64_t>();
    if (longest == 0) return absl::OkStatus();
    at::Tensor record = at::zeros({longest}, at::kByte);
    std::memcpy(record.mutable_data_ptr(), mine.data(), mine.size());
    at::Tensor records = at::empty({world_size() * longest}, bytes_on_gpu);
    TESSERA_RETURN_IF_ERROR(Gather(OnGpu(record), records));
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

bool BuiltWithNccl() { return true; }

std::vector<std::string> VisibleGpus() {
  int count = 0;
  // No driver, or no GPU: none is visible.
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  std::vector<std::string> gpus;
  for (int i = 0; i < count; ++i) {
    char bus_id[64] = {};
    if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), i) != cudaSuccess) break;
    gpus.emplace_back(bus_id);
  }
  (void)cudaGetLastError();  // clears it
  return gpus;
}

namespace {

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroupNCCL>> MakeGroup(
    const c10::intrusive_ptr<c10d::Store>& store,
    const NcclCommunicatorOptions& options) {
  // c10d's own watchdog ends the process when a collective fails; our monitor
  // returns a Status instead.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  return CatchTorch("nccl", [&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options.device));
    auto group_options = c10d::ProcessGroupNCCL::Options::create();
    group_options->timeout = kNever;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(
        store->clone(), options.rank, options.world_size, group_options);
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeNcclCommunicator(
    c10::intrusive_ptr<c10d::Store> store,
    const NcclCommunicatorOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, /*same_host=*/false));
  TESSERA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::ProcessGroupNCCL> group,
                           MakeGroup(store, options));
  return std::shared_ptr<Communicator>(std::make_shared<NcclCommunicator>(
      options, std::move(domain), std::move(group),
      std::make_shared<std::atomic<bool>>(false)));
}

}  // namespace tessera
