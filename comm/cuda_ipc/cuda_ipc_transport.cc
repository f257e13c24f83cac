#include "comm/cuda_ipc/cuda_ipc_transport.h"

#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAStream.h"
#include "comm/cuda_ipc/cuda_peer_memory.h"
#include "comm/cuda_ipc/slot_backend.h"
#include "comm/device/device_transport.h"
#include "comm/device/gpu_sum.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

absl::StatusOr<std::shared_ptr<Transport>> ConnectCudaIpcTransport(
    const CudaIpcOptions& options, Communicator* host,
    std::shared_ptr<Transport> host_transport) {
  DeviceTransportOptions on_device;
  on_device.rank = options.rank;
  on_device.world_size = options.world_size;
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
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<PeerMemory> memory,
                           ConnectCudaPeers(host, *stream, options.slot_bytes));
  const auto meeting = std::make_shared<HostMeeting>(host_transport);
  on_device.on_agreed = [meeting](const auto& call) { meeting->Begin(call); };
  return MakeDeviceTransport(
      on_device, std::move(host_transport),
      MakeSlotBackend("cuda_ipc", std::move(memory), *stream,
                      [meeting] { return meeting->Meet(); }));
}

}  // namespace tessera
