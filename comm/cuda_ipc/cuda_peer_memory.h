// PeerMemory of GPUs, by CUDA's interprocess memory and events. Only in builds
// with CUDA.
#ifndef COMM_CUDA_IPC_CUDA_PEER_MEMORY_H_
#define COMM_CUDA_IPC_CUDA_PEER_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "c10/core/Stream.h"
#include "comm/communicator.h"
#include "comm/cuda_ipc/peer_memory.h"

namespace tessera {

// On `stream`, of this rank's GPU, which outlives it. Takes 2 * `slot_bytes` of
// that GPU's memory from CUDA itself, not from libtorch's allocator (whose
// expandable segments could not be opened by others); they are freed some time
// after all ranks have let go of this.
//
// COLLECTIVE over `host`, which has one rank a process, and whose ranks share
// memory; of `host` nothing is used afterwards. Returns the same error on all
// ranks: ResourceExhausted where a GPU has no memory left; Unavailable where
// the processes cannot open each other's memory, saying what to try.
absl::StatusOr<std::shared_ptr<PeerMemory>> ConnectCudaPeers(
    Communicator* host, c10::Stream stream, int64_t slot_bytes);

}  // namespace tessera
#endif  // COMM_CUDA_IPC_CUDA_PEER_MEMORY_H_
