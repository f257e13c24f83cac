// The transport of GPU ranks of one host whose processes can open each
// other's device memory: several ranks on one GPU, which NCCL refuses, or GPUs
// with peer access.
//
// Sums are in rank order always, through an all-to-all and a kernel of ours, so
// that they have the bits that gloo gives.
#ifndef COMM_CUDA_IPC_CUDA_IPC_TRANSPORT_H_
#define COMM_CUDA_IPC_CUDA_IPC_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "comm/backend_table.h"
#include "comm/communicator.h"
#include "comm/transport.h"

namespace tessera {

struct CudaIpcOptions {
  int rank = 0;
  int world_size = 1;
  int device = 0;  // this rank's GPU; others may have the same
  // What a rank sends at a time. It holds two of these on its GPU.
  int64_t slot_bytes = kCudaIpcSlotBytes;
};

// `host` is a group of the same ranks, which share memory; its transport is
// used from here on. COLLECTIVE, blocking. Returns what ConnectCudaPeers does
// (comm/cuda_ipc/cuda_peer_memory.h), the same on all ranks, and Unimplemented
// in a build without CUDA.
absl::StatusOr<std::shared_ptr<Transport>> ConnectCudaIpcTransport(
    const CudaIpcOptions& options, Communicator* host,
    std::shared_ptr<Transport> host_transport);

}  // namespace tessera
#endif  // COMM_CUDA_IPC_CUDA_IPC_TRANSPORT_H_
