// comm/cuda_ipc/cuda_ipc_transport.h in a build without CUDA.
#include "comm/cuda_ipc/cuda_ipc_transport.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<Transport>> ConnectCudaIpcTransport(
    const CudaIpcOptions&, Communicator*, std::shared_ptr<Transport>) {
  return absl::UnimplementedError(
      "this build has no CUDA, so no cuda_ipc backend");
}

}  // namespace tessera
