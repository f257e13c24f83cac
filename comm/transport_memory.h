// Transport memory: what backends hold on a rank besides tensors, for one group
// of `ranks`.
//
//   shm    a staging area for what does not lie in memory that others may map
//   gloo   pieces that are received while others are summed; the sockets' own
//          buffers are the kernel's
//   nccl   buffers of its channels, on the device. An estimate: how many
//          channels NCCL takes depends on the machine's links
//   cuda_ipc  two slots that the others read, on the device
//
// Threads: any.
#ifndef COMM_TRANSPORT_MEMORY_H_
#define COMM_TRANSPORT_MEMORY_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

inline constexpr int64_t kShmStagingBytes = 2 << 20;
// Both sets of receive buffers, for all peers together. Larger ones leave the
// cache and are no faster; much smaller ones are slower.
inline constexpr int64_t kGlooReceiveBytes = 4 << 20;
inline constexpr int64_t kGlooMinPieceBytes = 64 << 10;

// What a rank of cuda_ipc sends at a time.
inline constexpr int64_t kCudaIpcSlotBytes = 16 << 20;

// "shm", "gloo", "hierarchical" (which has both), "nccl", "cuda_ipc"; 0: none
// of these, or one rank. The most, which tensors of some MiB take. `nccl`: its
// environment variables, of which NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS count.
int64_t TransportBytes(absl::string_view backend, int ranks,
                       const std::map<std::string, std::string>& nccl = {});

}  // namespace tessera
#endif  // COMM_TRANSPORT_MEMORY_H_
