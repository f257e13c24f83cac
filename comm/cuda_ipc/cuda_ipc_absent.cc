// comm/cuda_ipc/cuda_ipc_communicator.h in a build without CUDA.
#include "comm/cuda_ipc/cuda_ipc_communicator.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<Communicator>> MakeCudaIpcCommunicator(
    const CudaIpcCommunicatorOptions&, std::shared_ptr<FailureDomain>,
    std::shared_ptr<QueuedCommunicator>) {
  return absl::UnimplementedError(
      "this build has no CUDA, so no cuda_ipc backend");
}

}  // namespace tessera
