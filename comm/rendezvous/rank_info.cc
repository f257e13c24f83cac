#include "comm/rendezvous/rank_info.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace tessera {

std::string RankInfo::Encode() const {
  return absl::StrCat(host, "\n", network, "\n", address, "\n", cpus, "\n",
                      memory_group, "\n", build, "\n", build_id, "\n",
                      absl::StrJoin(gpus, "\n"));
}

RankInfo RankInfo::Decode(absl::string_view text) {
  RankInfo info;
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  lines.resize(std::max<size_t>(lines.size(), 7));
  info.host = lines[0];
  info.network = lines[1];
  info.address = lines[2];
  info.cpus = lines[3];
  info.memory_group = lines[4];
  info.build = lines[5];
  info.build_id = lines[6];
  for (size_t i = 7; i < lines.size(); ++i) {
    if (!lines[i].empty()) info.gpus.push_back(lines[i]);
  }
  return info;
}

}  // namespace tessera
