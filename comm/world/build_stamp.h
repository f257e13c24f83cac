// Compares the builds of this library that ranks run: ranks of different builds
// may not understand each other, and a hang or a wrong number does not show
// why.
#ifndef COMM_WORLD_BUILD_STAMP_H_
#define COMM_WORLD_BUILD_STAMP_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "comm/rendezvous/rank_info.h"

namespace tessera {

// The version of what ranks send each other, and of the order of the
// collectives that the engine makes. Raise it with every change after which
// ranks of the two builds could not work together.
inline constexpr int kProtocol = 1;

// "protocol 1, libtorch 2.11.0".
std::string BuildStamp();

// The linker's name for the file that this code is in (NT_GNU_BUILD_ID): the
// program, or the shared library. "" if it gave none.
std::string BuildId();

// Returns FailedPrecondition if the ranks' stamps differ, identical on all
// ranks.
absl::Status CheckBuilds(const std::vector<RankInfo>& infos);
// Words for a warning if their stamps are equal and the files are not; else "".
std::string OtherFiles(const std::vector<RankInfo>& infos);

}  // namespace tessera
#endif  // COMM_WORLD_BUILD_STAMP_H_
