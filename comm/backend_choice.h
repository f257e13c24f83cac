// Which rank shares its host, and its GPU, with which; and the backend that
// follows. Every rank computes the same from the cards of all ranks, so no
// further agreement is needed. No torch.
#ifndef COMM_BACKEND_CHOICE_H_
#define COMM_BACKEND_CHOICE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// What a rank tells the others about itself when they meet.
struct RankCard {
  std::string host;
  std::vector<std::string> gpus;  // that it sees, by device index
  std::string network;            // see NetworkId in comm/local_address.h
  std::string address;  // at which others may reach it; "" if not known
  std::string cpus;     // see AllowedCpus in comm/cpus.h

  std::string Encode() const;
  static RankCard Decode(absl::string_view text);
};

struct Neighbours {
  int local_rank = 0;
  int local_world_size = 1;
  std::vector<int> local_ranks;  // the ranks of this host
  // All ranks, and they reach each other over the loopback.
  bool same_host = true;
};
Neighbours FindNeighbours(const std::vector<RankCard>& cards, int rank);

// InvalidArgument for anything but "auto", "shm", "gloo" and "nccl".
absl::Status CheckBackendName(absl::string_view name);

// "shm", "gloo" or "nccl". `wanted` is one of those or "auto": nccl where each
// rank has a GPU of its own, shm where all ranks seem to be on one host
// (whether they can share memory shows when they try), else gloo. Returns
// InvalidArgument for another name, for shm with ranks on several hosts, and
// for nccl where a rank has no GPU or two have the same: it names them, and
// gloo as the mend.
absl::StatusOr<std::string> ChooseBackend(const std::vector<RankCard>& cards,
                                          absl::string_view wanted,
                                          bool built_with_nccl);

// The device index that `rank` uses: its local rank among those it sees, -1
// without a GPU.
int DeviceOf(const std::vector<RankCard>& cards, int rank);

}  // namespace tessera
#endif  // COMM_BACKEND_CHOICE_H_
