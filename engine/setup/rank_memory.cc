#include "engine/setup/rank_memory.h"

#include <algorithm>

#include "base/memory/available_memory.h"
#include "base/status.h"
#include "comm/all_gather_values.h"

namespace tessera {
namespace {

absl::StatusOr<int64_t> MemoryOfRank(at::Device device, int local_world_size) {
  if (!device.is_cpu()) {
    const auto [free, total] =
        at::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return static_cast<int64_t>(free / 10 * 9);
  }
  TESSERA_ASSIGN_OR_RETURN(const int64_t bytes, AvailableHostMemory());
  return bytes / 10 * 9 / local_world_size;
}

}  // namespace

absl::StatusOr<int64_t> AgreeOnRankMemory(int64_t limit, at::Device device,
                                          int local_world_size,
                                          absl::string_view where,
                                          Communicator* comm) {
  int64_t memory = limit;
  absl::Status mine;
  if (memory == 0) {
    const auto found = MemoryOfRank(device, local_world_size);
    mine = found.status();
    if (found.ok()) memory = *found;
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine, where));
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValue(comm, memory, CommTag{"memory of the ranks"}));
  return *std::min_element(all.begin(), all.end());
}

}  // namespace tessera
