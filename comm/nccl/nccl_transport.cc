#include "comm/nccl/nccl_transport.h"

#include <cuda_runtime.h>

#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAGuard.h"
#include "comm/device/device_transport.h"
#include "comm/device/gpu_sum.h"
#include "comm/nccl/nccl_group.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

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

absl::StatusOr<std::shared_ptr<Transport>> ConnectNcclTransport(
    const c10::intrusive_ptr<c10d::Store>& store, const NcclOptions& options,
    std::shared_ptr<Transport> host) {
  const auto device = static_cast<c10::DeviceIndex>(options.device);
  c10::intrusive_ptr<c10d::Backend> group, sums;
  TESSERA_RETURN_IF_ERROR(CatchTorch("nccl", [&]() -> absl::Status {
    const c10::cuda::CUDAGuard guard(device);
    TESSERA_ASSIGN_OR_RETURN(
        group, NewNcclGroup(store, options.rank, options.world_size));
    if (!options.sums_apart) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(
        sums,
        NewNcclGroup(c10::make_intrusive<c10d::PrefixStore>("sums", store),
                     options.rank, options.world_size));
    return absl::OkStatus();
  }));
  DeviceTransportOptions on_device;
  on_device.rank = options.rank;
  on_device.world_size = options.world_size;
  on_device.device = at::Device(at::kCUDA, device);
  on_device.backend = "nccl";
  if (options.ordered_sums) on_device.ordered_sum = OrderedSumOnGpu;
  return MakeDeviceTransport(on_device, std::move(host), std::move(group),
                             std::move(sums));
}

}  // namespace tessera
