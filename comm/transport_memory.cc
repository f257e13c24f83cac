#include "comm/transport_memory.h"

#include <algorithm>

#include "absl/strings/numbers.h"

namespace tessera {
namespace {

// NCCL's documentation: NCCL_BUFFSIZE, 4 MiB unless set; at most 32 channels
// (NCCL_MAX_NCHANNELS). Of a ring each channel sends to one rank and receives
// from one.
constexpr int64_t kNcclBufferBytes = 4 << 20;
constexpr int64_t kNcclChannels = 32;
constexpr int64_t kNcclConnections = 2;

int64_t Setting(const std::map<std::string, std::string>& settings,
                const char* name, int64_t otherwise) {
  const auto found = settings.find(name);
  int64_t value = 0;
  return found != settings.end() && absl::SimpleAtoi(found->second, &value) &&
                 value > 0
             ? value
             : otherwise;
}

}  // namespace

int64_t TransportBytes(absl::string_view backend, int ranks,
                       const std::map<std::string, std::string>& nccl) {
  if (ranks <= 1) return 0;
  const int64_t received =
      std::max(kGlooReceiveBytes, 2 * int64_t{ranks - 1} * kGlooMinPieceBytes);
  if (backend == "shm") return kShmStagingBytes;
  if (backend == "gloo") return received;
  if (backend == "hierarchical") return kShmStagingBytes + received;
  if (backend == "cuda_ipc") return 2 * kCudaIpcSlotBytes;
  if (backend != "nccl") return 0;
  return Setting(nccl, "NCCL_MAX_NCHANNELS", kNcclChannels) * kNcclConnections *
         Setting(nccl, "NCCL_BUFFSIZE", kNcclBufferBytes);
}

}  // namespace tessera
