#include "comm/nccl/nccl_transport.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAGuard.h"
#include "comm/device/device_transport.h"
#include "comm/device/gpu_sum.h"

// The only file that sees c10d's NCCL header.
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"

namespace tessera {
namespace {

// Waits are ended by our own monitor; NCCL's timeout must never come first.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

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
    const c10::intrusive_ptr<c10d::Store>& store, const NcclOptions& options) {
  // c10d's own watchdog ends the process when a collective fails; our monitor
  // returns a Status instead.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  // The thread that gives a collective to the device must not wait for its end.
  setenv("TORCH_NCCL_BLOCKING_WAIT", "0", /*overwrite=*/1);
  return CatchTorch("nccl", [&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options.device));
    auto group_options = c10d::ProcessGroupNCCL::Options::create();
    group_options->timeout = kNever;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(
        store->clone(), options.rank, options.world_size, group_options);
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> ConnectNcclTransport(
    const c10::intrusive_ptr<c10d::Store>& store, const NcclOptions& options,
    std::shared_ptr<Transport> host) {
  TESSERA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::ProcessGroupNCCL> group,
                           MakeGroup(store, options));
  DeviceTransportOptions on_device;
  on_device.rank = options.rank;
  on_device.world_size = options.world_size;
  on_device.device =
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  on_device.backend = "nccl";
  if (options.ordered_sums) on_device.ordered_sum = OrderedSumOnGpu;
  return MakeDeviceTransport(on_device, std::move(host), std::move(group));
}

}  // namespace tessera
