// MapPeers: the ranks of one host map each other's memory.
//
//   rank p listens on a socket without a name in the file system, whose name is
//   random; the store tells it to the others; each of them connects, and gets
//   p's two memfds and two random words, which must then stand in p's head.
//
// So that ranks share a host is proved by doing what it is needed for, and
// nothing stays behind: sockets and memory end with the processes.
#ifndef COMM_SHM_MAP_PEERS_H_
#define COMM_SHM_MAP_PEERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/shm/team.h"

namespace c10d {
class Store;
}

namespace tessera::shm {

class PeerHeap;

// All ranks' memory, as this process maps it; unmapped at the end. The heap of
// another process is mapped once, for all groups.
class HostMemory {
 public:
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  const std::vector<Member>& members() const { return members_; }
  int64_t heap_bytes() const { return heap_bytes_; }

 private:
  friend class PeerMapper;
  HostMemory();

  struct Mapping {
    void* data;
    int64_t bytes;
  };
  std::vector<Member> members_;
  std::vector<Mapping> mappings_;                       // of heads
  std::vector<std::shared_ptr<const PeerHeap>> heaps_;  // of the others
  int64_t heap_bytes_ = 0;                              // the same on all ranks
};

// COLLECTIVE over the `world_size` ranks, blocking. `store` must hold keys of
// this call only. Returns the same on all ranks: Unavailable naming the rank
// and what it could not do if they cannot share memory (other hosts, users or
// network namespaces, limits); throws what the store throws. `names`: what the
// ranks are called in messages, instead of 0, 1, ...
absl::StatusOr<std::unique_ptr<HostMemory>> MapPeers(
    c10d::Store& store, int rank, int world_size, absl::Duration timeout,
    std::vector<int> names = {});

}  // namespace tessera::shm
#endif  // COMM_SHM_MAP_PEERS_H_
