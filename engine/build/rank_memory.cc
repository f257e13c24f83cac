#include "engine/build/rank_memory.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "base/memory/available_memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "sharding/construct/construction.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// Returns the bytes of parameters on the CPU, each storage once.
int64_t BytesOnCpu(const torch::nn::Module& module) {
  absl::flat_hash_set<const c10::StorageImpl*> seen;
  int64_t bytes = 0;
  for (const at::Tensor& p : module.parameters()) {
    if (!p.defined() || !p.is_cpu() || !p.has_storage() || IsEvictable(p)) {
      continue;
    }
    if (!seen.insert(p.storage().unsafeGetStorageImpl()).second) continue;
    bytes += static_cast<int64_t>(p.storage().nbytes());
  }
  return bytes;
}

}  // namespace

absl::StatusOr<int64_t> RankMemory(at::Device device, int ranks) {
  if (!device.is_cpu()) {
    return CatchTorch("memory", [&]() -> absl::StatusOr<int64_t> {
      const auto [free, total] =
          at::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
      return static_cast<int64_t>(free / 10 * 9);
    });
  }
  TESSERA_ASSIGN_OR_RETURN(const int64_t bytes, AvailableHostMemory());
  return bytes / 10 * 9 / ranks;
}

absl::StatusOr<int64_t> AgreeOnRankMemory(int64_t limit, at::Device device,
                                          int local_world_size,
                                          const torch::nn::Module& module,
                                          absl::string_view where,
                                          Communicator* comm) {
  int64_t memory = limit;
  absl::Status mine;
  if (memory == 0) {
    const auto found = RankMemory(device, local_world_size);
    mine = found.status();
    // A full device has 1 byte: 0 would ask for it to be found out.
    if (found.ok()) {
      memory = std::max<int64_t>(
          1, *found + (device.is_cpu() ? BytesOnCpu(module) : 0));
    }
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine, where));
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValue(comm, memory, CommTag{"memory of the ranks"}));
  return *std::min_element(all.begin(), all.end());
}

}  // namespace tessera
