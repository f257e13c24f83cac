// The transport of CPU ranks on several hosts that have more than one rank
// each: shared memory within a host (comm/shm), Gloo between hosts.
//
// What a host sends to others, B the bytes of the whole tensor, H hosts:
//
//   all-gather        b (H-1), where its ranks' slices have b bytes
//   reduce-scatter    at most B, whatever the number of its ranks
//   all-reduce        a reduce-scatter, then an all-gather
//   broadcast         B (H-1), the root's host alone
//   strings           those of its ranks, to each other host
//
// All ranks of a host send and receive, each its turn of the pieces; strings go
// through the first one.
//
// Sums are in rank order, so they cannot be made on each host and then added: a
// sum goes from host to host, which each add the ranks that come next, and then
// to its owner; or a host's contributions are sent as they are where that is
// less (comm/hierarchical/host_plan.h). The figure is of hosts that have
// equally many ranks, at least two, whose numbers follow each other; where they
// do not, bytes grow with the ranks, up to those of gloo. Of float16 and
// bfloat16 it is 2 B, since sums under way are float32.
//
// Buffers of counted memory are read by the ranks of a host where they lie,
// others are staged. Buffers for pieces are kept, a few of at most 1 MiB.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_TRANSPORT_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_TRANSPORT_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/shm/shm_memory.h"
#include "comm/transport.h"

namespace tessera {

struct HierarchicalOptions : GlooTransportOptions {
  // By rank: any number that the ranks which share memory with it alone have.
  std::vector<int> hosts;
};

// The ranks of each host map each other's memory (comm/shm/map_peers.h), and
// all agree how that went. COLLECTIVE, blocking. `store` must hold keys of this
// group only. Returns Unavailable, the same on all ranks, if the ranks of a
// host cannot share memory.
absl::StatusOr<std::shared_ptr<ShmMemory>> ConnectHosts(
    const c10::intrusive_ptr<c10d::Store>& store,
    const HierarchicalOptions& options);

// COLLECTIVE, blocking. `memory` and `store` are those of ConnectHosts. Returns
// Unavailable or DeadlineExceeded.
absl::StatusOr<std::shared_ptr<Transport>> ConnectHierarchicalTransport(
    const c10::intrusive_ptr<c10d::Store>& store,
    const HierarchicalOptions& options, std::shared_ptr<ShmMemory> memory);

}  // namespace tessera
#endif  // COMM_HIERARCHICAL_HIERARCHICAL_TRANSPORT_H_
