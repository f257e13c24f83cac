#include "comm/backend_table.h"

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

using Settings = std::map<std::string, std::string>;

TransportMemory MemoryOfShm(int, const Settings&) { return {kShmStagingBytes}; }

TransportMemory MemoryOfGloo(int ranks, const Settings&) {
  return {
      std::max(kGlooReceiveBytes, 2 * int64_t{ranks - 1} * kGlooMinPieceBytes)};
}

TransportMemory MemoryOfHierarchical(int ranks, const Settings& nccl) {
  return {MemoryOfShm(ranks, nccl).bytes + MemoryOfGloo(ranks, nccl).bytes};
}

// Sums have a communicator of their own (comm/nccl/nccl_transport.h).
TransportMemory MemoryOfNccl(int, const Settings& nccl) {
  const auto order = nccl.find("NCCL_LAUNCH_ORDER_IMPLICIT");
  const int communicators = order == nccl.end() || order->second == "1" ? 2 : 1;
  return {communicators * Setting(nccl, "NCCL_MAX_NCHANNELS", kNcclChannels) *
              kNcclConnections *
              Setting(nccl, "NCCL_BUFFSIZE", kNcclBufferBytes),
          /*estimated=*/true};
}

TransportMemory MemoryOfCudaIpc(int, const Settings&) {
  return {2 * kCudaIpcSlotBytes};
}

}  // namespace

absl::Span<const BackendInfo> Backends() {
  static constexpr BackendInfo kBackends[] = {
      {"shm", false, MemoryOfShm},
      {"hierarchical", false, MemoryOfHierarchical},
      {"gloo", false, MemoryOfGloo},
      {"nccl", true, MemoryOfNccl},
      {"cuda_ipc", true, MemoryOfCudaIpc},
  };
  return kBackends;
}

const BackendInfo* FindBackend(absl::string_view name) {
  for (const BackendInfo& backend : Backends()) {
    if (backend.name == name) return &backend;
  }
  return nullptr;
}

absl::string_view BackendByMemory(int ranks, int groups) {
  if (groups == 1) return "shm";
  return groups < ranks ? "hierarchical" : "gloo";
}

TransportMemory MemoryOfTransport(absl::string_view backend, int ranks,
                                  const Settings& nccl) {
  const BackendInfo* const info = FindBackend(backend);
  if (info == nullptr || ranks <= 1) return {};
  return info->memory(ranks, nccl);
}

}  // namespace tessera
