#include "comm/cuda_ipc/cuda_ipc_communicator.h"

#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAStream.h"
#include "comm/cuda_ipc/cuda_peer_memory.h"
#include "comm/cuda_ipc/slot_backend.h"
#include "comm/nccl/device_communicator.h"
#include "comm/nccl/gpu_sum.h"
#include "comm/watch/failure_domain.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

absl::StatusOr<std::shared_ptr<Communicator>> MakeCudaIpcCommunicator(
    const CudaIpcCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    std::shared_ptr<QueuedCommunicator> host) {
  DeviceCommunicatorOptions on_device{options};
  on_device.device =
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  on_device.backend = "cuda_ipc";
  on_device.ordered_sum = OrderedSumOnGpu;
  const absl::StatusOr<c10::Stream> stream = CatchTorch("cuda_ipc", [&] {
    return c10::cuda::getStreamFromPool(/*isHighPriority=*/true,
                                        on_device.device.index())
        .unwrap();
  });
  TESSERA_RETURN_IF_ERROR(host->AgreeOk(stream.status(), "stream of cuda_ipc"));
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<PeerMemory> memory,
      ConnectCudaPeers(host.get(), *stream, options.slot_bytes));
  const auto meeting = std::make_shared<HostMeeting>(host);
  on_device.on_agreed = [meeting](const auto& call) { meeting->Begin(call); };
  return MakeDeviceCommunicator(
      on_device, std::move(domain), std::move(host),
      MakeSlotBackend("cuda_ipc", std::move(memory), *stream,
                      [meeting] { return meeting->Meet(); }));
}

}  // namespace tessera
