#include "comm/backend_choice.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr absl::string_view kGlooMend =
    "; take backend gloo, which carries GPU tensors through host memory";

absl::Status CheckGpus(const std::vector<RankCard>& cards) {
  std::map<std::pair<std::string, std::string>, size_t> user_of;
  for (size_t r = 0; r < cards.size(); ++r) {
    const int device = DeviceOf(cards, static_cast<int>(r));
    if (device < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("backend nccl: rank ", r, " sees no GPU", kGlooMend));
    }
    const auto [other, alone] = user_of.emplace(
        std::make_pair(cards[r].host, cards[r].gpus[device]), r);
    if (!alone) {
      return absl::InvalidArgumentError(
          absl::StrCat("backend nccl: ranks ", other->second, " and ", r,
                       " would use the same GPU (", cards[r].gpus[device],
                       "), which NCCL refuses", kGlooMend));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string RankCard::Encode() const {
  return absl::StrCat(host, "\n", network, "\n", address, "\n", cpus, "\n",
                      absl::StrJoin(gpus, "\n"));
}

RankCard RankCard::Decode(absl::string_view text) {
  RankCard card;
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  lines.resize(std::max<size_t>(lines.size(), 4));
  card.host = lines[0];
  card.network = lines[1];
  card.address = lines[2];
  card.cpus = lines[3];
  for (size_t i = 4; i < lines.size(); ++i) {
    if (!lines[i].empty()) card.gpus.push_back(lines[i]);
  }
  return card;
}

Neighbours FindNeighbours(const std::vector<RankCard>& cards, int rank) {
  Neighbours result;
  result.local_world_size = 0;
  bool same_network = true;
  for (int r = 0; r < static_cast<int>(cards.size()); ++r) {
    if (cards[r].host != cards[rank].host) continue;
    ++result.local_world_size;
    result.local_ranks.push_back(r);
    same_network &= cards[r].network == cards[rank].network;
    if (r < rank) ++result.local_rank;
  }
  result.same_host =
      same_network && result.local_world_size == static_cast<int>(cards.size());
  return result;
}

int DeviceOf(const std::vector<RankCard>& cards, int rank) {
  const int num_gpus = static_cast<int>(cards[rank].gpus.size());
  if (num_gpus == 0) return -1;
  return FindNeighbours(cards, rank).local_rank % num_gpus;
}

absl::Status CheckBackendName(absl::string_view name) {
  if (name == "auto" || name == "shm" || name == "gloo" || name == "nccl") {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("backend '", name, "': expected auto, shm, gloo or nccl"));
}

absl::StatusOr<std::string> ChooseBackend(const std::vector<RankCard>& cards,
                                          absl::string_view wanted,
                                          bool built_with_nccl) {
  TESSERA_RETURN_IF_ERROR(CheckBackendName(wanted));
  if (wanted == "gloo") return std::string(wanted);
  const bool same_host = FindNeighbours(cards, 0).same_host;
  if (wanted == "auto") {
    if (built_with_nccl && CheckGpus(cards).ok()) return "nccl";
    return same_host ? "shm" : "gloo";
  }
  if (wanted == "shm") {
    if (same_host) return "shm";
    return absl::InvalidArgumentError(
        "backend shm: the ranks are not all on one host and in one network "
        "namespace; take gloo");
  }
  if (!built_with_nccl) {
    return absl::InvalidArgumentError(
        "backend nccl: this program was built without CUDA; take gloo");
  }
  absl::Status gpus = CheckGpus(cards);
  if (!gpus.ok()) return gpus;
  return std::string(wanted);
}

}  // namespace tessera
