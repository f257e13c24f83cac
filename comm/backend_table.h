// The table of backends: their names, and the memory that they take on a rank
// besides tensors, for one group.
//
//   shm    a staging area for what does not lie in memory that others may map
//   gloo   pieces that are received while others are summed; the sockets' own
//          buffers are the kernel's
//   nccl   buffers of the channels of two communicators, on the device. An
//          estimate: how many channels NCCL takes depends on the machine's
//          links
//   cuda_ipc  two slots that the others read, on the device
//
// How each is connected: comm/world/make_group.cc. Threads: any.
#ifndef COMM_BACKEND_TABLE_H_
#define COMM_BACKEND_TABLE_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tessera {

inline constexpr int64_t kShmStagingBytes = 2 << 20;
// Both sets of receive buffers, for all peers together. Larger ones leave the
// cache and are no faster; much smaller ones are slower.
inline constexpr int64_t kGlooReceiveBytes = 4 << 20;
inline constexpr int64_t kGlooMinPieceBytes = 64 << 10;

// The bytes that a rank of cuda_ipc sends at a time.
inline constexpr int64_t kCudaIpcSlotBytes = 16 << 20;

struct TransportMemory {
  int64_t bytes = 0;  // the most, which tensors of some MiB take
  bool estimated = false;
};

struct BackendInfo {
  absl::string_view name;
  bool of_devices = false;  // wants a GPU on each rank
  // Returns the memory that a rank needs among `ranks`, at least two. `nccl`:
  // NCCL's environment variables, of which NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS
  // and NCCL_LAUNCH_ORDER_IMPLICIT count.
  TransportMemory (*memory)(int ranks,
                            const std::map<std::string, std::string>& nccl);
};
absl::Span<const BackendInfo> Backends();
// Finds a backend by name; null: there is none.
const BackendInfo* FindBackend(absl::string_view name);
// Returns the backend that suits `ranks` without GPUs of which each of `groups`
// shares memory.
absl::string_view BackendByMemory(int ranks, int groups);
// Returns the memory that a transport takes; 0 for an unknown name, and for one
// rank.
TransportMemory MemoryOfTransport(
    absl::string_view backend, int ranks,
    const std::map<std::string, std::string>& nccl = {});

}  // namespace tessera
#endif  // COMM_BACKEND_TABLE_H_
