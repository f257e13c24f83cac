// ShardMesh: the connections among the ranks of a group over which they read
// each other's shards. Each rank connects to each other one, for its own
// requests:
//
//   rank a   ask[b] ------> serve[a]   rank b
//            serve[b] <---- ask[a]
//
// With `only_peers` there are fewer: a rank connects to one other.
//
// Only ranks of the job are let in (comm/connect/handshake.h); their key
// comes from the job's secret and a token that the ranks exchanged. Ranks that
// are all on one host listen on the loopback only.
#ifndef COMM_SERVE_SHARD_MESH_H_
#define COMM_SERVE_SHARD_MESH_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

// Descriptors of connected, non-blocking sockets by rank; -1 for the own one,
// and for those that were taken (the others are closed at the end).
struct ShardMesh {
  explicit ShardMesh(int world_size)
      : ask(world_size, -1), serve(world_size, -1) {}
  ~ShardMesh();
  ShardMesh(const ShardMesh&) = delete;
  ShardMesh& operator=(const ShardMesh&) = delete;

  std::vector<int> ask, serve;
};

struct ShardMeshOptions {
  absl::Duration timeout = absl::Seconds(60);
  // An error: a rank will not come, so waiting is in vain. Asked now and then;
  // null: there is nothing to ask.
  std::function<absl::Status()> trouble;
  // By rank, the only one that it connects to. Empty: all others.
  std::vector<int> only_peers;
  const char* purpose = "shards";  // of comm/connect/handshake.h
  // In errors: what a peer is, in place of its addresses; and where they come
  // from, "" for the tag's `what`.
  std::string what, where;
};

// Connects this rank with the others. COLLECTIVE, blocking. A rank that cannot
// announces that while the others wait. Returns the same error on all ranks.
absl::StatusOr<std::unique_ptr<ShardMesh>> ConnectShardMesh(
    Communicator& group, const ShardMeshOptions& options, const CommTag& tag);

}  // namespace tessera
#endif  // COMM_SERVE_SHARD_MESH_H_
