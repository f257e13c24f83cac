// The communicator of GPU ranks of one host whose processes can open each
// other's device memory: several ranks on one GPU, which NCCL refuses, or GPUs
// with peer access.
//
// Sums are in rank order always, through an all-to-all and a kernel of ours, so
// that they have the bits that gloo gives.
#ifndef COMM_CUDA_IPC_CUDA_IPC_COMMUNICATOR_H_
#define COMM_CUDA_IPC_CUDA_IPC_COMMUNICATOR_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/group_options.h"
#include "comm/transport_memory.h"

namespace tessera {

class FailureDomain;
class QueuedCommunicator;

struct CudaIpcCommunicatorOptions : GroupOptions {
  int device = 0;  // this rank's GPU; others may have the same
  // What a rank sends at a time. It holds two of these on its GPU.
  int64_t slot_bytes = kCudaIpcSlotBytes;
};

// COLLECTIVE, blocking. `domain` and `host` are as of MakeDeviceCommunicator
// (comm/nccl/device_communicator.h); the ranks of `host` share memory. Returns
// what ConnectCudaPeers does (comm/cuda_ipc/cuda_peer_memory.h), the same on
// all ranks, and Unimplemented in a build without CUDA.
absl::StatusOr<std::shared_ptr<Communicator>> MakeCudaIpcCommunicator(
    const CudaIpcCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    std::shared_ptr<QueuedCommunicator> host);

}  // namespace tessera
#endif  // COMM_CUDA_IPC_CUDA_IPC_COMMUNICATOR_H_
