#include "comm/rendezvous/rank_info.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace tessera {

std::string RankInfo::Encode() const {
  return absl::StrCat(host, "\n", network, "\n", address, "\n", cpus, "\n",
                      memory_group, "\n", absl::StrJoin(gpus, "\n"));
}

RankInfo RankInfo::Decode(absl::string_view text) {
  RankInfo card;
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  lines.resize(std::max<size_t>(lines.size(), 5));
  card.host = lines[0];
  card.network = lines[1];
  card.address = lines[2];
  card.cpus = lines[3];
  card.memory_group = lines[4];
  for (size_t i = 5; i < lines.size(); ++i) {
    if (!lines[i].empty()) card.gpus.push_back(lines[i]);
  }
  return card;
}

}  // namespace tessera
