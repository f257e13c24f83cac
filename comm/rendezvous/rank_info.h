// RankInfo: what a rank sends the others about itself when they meet. No torch.
#ifndef COMM_RENDEZVOUS_RANK_INFO_H_
#define COMM_RENDEZVOUS_RANK_INFO_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

struct RankInfo {
  std::string host;  // see HostId in comm/rendezvous/local_address.h
  std::vector<std::string> gpus;  // that it sees, by device index
  std::string network;       // see NetworkId in comm/rendezvous/local_address.h
  std::string address;       // at which others may reach it; "" if not known
  std::string cpus;          // see AllowedCpus in comm/launch/cpus.h
  std::string memory_group;  // see WorldOptions
  std::string build;         // BuildStamp in comm/world/build_stamp.h
  std::string build_id;      // BuildId there

  std::string Encode() const;
  static RankInfo Decode(absl::string_view text);
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_RANK_INFO_H_
