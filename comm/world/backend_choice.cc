#include "comm/world/backend_choice.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/backend_table.h"

namespace tessera {
namespace {

constexpr absl::string_view kGlooFix =
    "; take backend gloo, which carries GPU tensors through host memory";

absl::Status CheckEachSeesAGpu(const std::vector<RankInfo>& infos,
                               absl::string_view backend) {
  for (size_t r = 0; r < infos.size(); ++r) {
    if (!infos[r].gpus.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "backend ", backend, ": rank ", r, " sees no GPU", kGlooFix));
  }
  return absl::OkStatus();
}

// Each has one that no other uses.
absl::Status CheckOwnGpus(const std::vector<RankInfo>& infos) {
  TESSERA_RETURN_IF_ERROR(CheckEachSeesAGpu(infos, "nccl"));
  std::map<std::pair<std::string, std::string>, size_t> user_of;
  for (size_t r = 0; r < infos.size(); ++r) {
    const int device = DeviceOf(infos, static_cast<int>(r));
    const auto [other, alone] = user_of.emplace(
        std::make_pair(infos[r].host, infos[r].gpus[device]), r);
    if (!alone) {
      return absl::InvalidArgumentError(absl::StrCat(
          "backend nccl: ranks ", other->second, " and ", r,
          " would use the same GPU (", infos[r].gpus[device],
          "), which NCCL refuses; take backend cuda_ipc if they are all on "
          "one host, or gloo, which carries GPU tensors through "
          "host memory"));
    }
  }
  return absl::OkStatus();
}

// What fits ranks without GPUs.
std::string ByMemory(const std::vector<RankInfo>& infos) {
  const std::vector<int> groups = MemoryGroups(infos);
  return std::string(
      BackendByMemory(static_cast<int>(infos.size()),
                      *std::max_element(groups.begin(), groups.end()) + 1));
}

// Whether they can open each other's memory shows when they try.
absl::Status CheckCudaIpc(const std::vector<RankInfo>& infos) {
  TESSERA_RETURN_IF_ERROR(CheckEachSeesAGpu(infos, "cuda_ipc"));
  if (ByMemory(infos) == "shm") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "backend cuda_ipc: the ranks are not all on one host and in one network "
      "namespace; take nccl if each has a GPU of its own, or gloo, which "
      "carries GPU tensors through host memory"));
}

}  // namespace

Neighbours FindNeighbours(const std::vector<RankInfo>& infos, int rank) {
  Neighbours result;
  result.local_world_size = 0;
  bool same_network = true;
  for (int r = 0; r < static_cast<int>(infos.size()); ++r) {
    if (infos[r].host != infos[rank].host) continue;
    ++result.local_world_size;
    result.local_ranks.push_back(r);
    same_network &= infos[r].network == infos[rank].network;
    if (r < rank) ++result.local_rank;
  }
  result.same_host =
      same_network && result.local_world_size == static_cast<int>(infos.size());
  return result;
}

int DeviceOf(const std::vector<RankInfo>& infos, int rank) {
  const int num_gpus = static_cast<int>(infos[rank].gpus.size());
  if (num_gpus == 0) return -1;
  return FindNeighbours(infos, rank).local_rank % num_gpus;
}

std::vector<int> MemoryGroups(const std::vector<RankInfo>& infos) {
  std::map<std::tuple<std::string, std::string, std::string>, int> index;
  std::vector<int> groups;
  for (const RankInfo& info : infos) {
    groups.push_back(index
                         .emplace(std::make_tuple(info.host, info.network,
                                                  info.memory_group),
                                  static_cast<int>(index.size()))
                         .first->second);
  }
  return groups;
}

std::string BackendOfSubgroup(absl::string_view whole,
                              const std::vector<RankInfo>& infos) {
  if (infos.size() == 1) return "self";
  if (whole == "hierarchical") return ByMemory(infos);
  return std::string(whole);
}

absl::Status CheckBackendName(absl::string_view name) {
  if (name == "auto" || FindBackend(name) != nullptr) return absl::OkStatus();
  std::string names = "auto";
  for (const BackendInfo& backend : Backends()) {
    const bool last = &backend == &Backends().back();
    absl::StrAppend(&names, last ? " or " : ", ", backend.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("backend '", name, "': expected ", names));
}

absl::StatusOr<std::string> ChooseBackend(const std::vector<RankInfo>& infos,
                                          absl::string_view wanted,
                                          bool built_with_nccl) {
  TESSERA_RETURN_IF_ERROR(CheckBackendName(wanted));
  if (wanted == "auto") {
    if (built_with_nccl && CheckOwnGpus(infos).ok()) return "nccl";
    return ByMemory(infos);
  }
  if (wanted == "shm") {
    if (ByMemory(infos) == "shm") return "shm";
    return absl::InvalidArgumentError(
        "backend shm: the ranks are not all on one host and in one network "
        "namespace; take hierarchical or gloo");
  }
  if (!FindBackend(wanted)->of_devices) return std::string(wanted);
  if (!built_with_nccl) {
    return absl::InvalidArgumentError(
        absl::StrCat("backend ", wanted,
                     ": this program was built without CUDA; take gloo"));
  }
  TESSERA_RETURN_IF_ERROR(wanted == "nccl" ? CheckOwnGpus(infos)
                                           : CheckCudaIpc(infos));
  return std::string(wanted);
}

int GpuOf(const std::vector<RankInfo>& infos, int rank,
          absl::string_view wanted, bool built_with_nccl) {
  const auto chosen = ChooseBackend(infos, wanted, built_with_nccl);
  if (!chosen.ok() || !FindBackend(*chosen)->of_devices) return -1;
  return DeviceOf(infos, rank);
}

}  // namespace tessera
