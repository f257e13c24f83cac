// The operations of ranks on several hosts, on plain memory: shared memory
// (comm/shm) within a host, messages between hosts. Who does what:
// comm/hierarchical/host_plan.h.
//
//   window k    its messages are started kAhead windows before it is worked on,
//               and waited for when kBehind windows have been worked on after
//               it
//
// Messages between two ranks have one tag for each kind, so that those of a
// kind are received in the order in which they are sent: by window, stop,
// piece.
//
// All ranks work through windows, and the stops of a window, in the same order,
// and each step needs earlier ones only: so no circle of ranks waits.
//
// Errors, all final: those of shm::Exchange and GlooMessages::WaitAll.
// Threads: one at a time. All calls are COLLECTIVE and blocking.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_OPS_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_OPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "comm/collective.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/gloo/piece_buffers.h"
#include "comm/hierarchical/host_plan.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/exchange.h"

namespace tessera {

// What an operation works with; `exchange` is of the ranks of this host, in the
// placement's order. Borrowed.
struct HostGroup {
  const HostPlacement* placement;
  int rank;
  shm::Exchange* exchange;
  GlooMessages* messages;
  PieceBuffers* buffers;
};

struct SlicedCall {
  std::string what;
  uint32_t signature = 0;  // of Call
  CollectiveOp op = CollectiveOp::kAllReduce;
  int root = 0;
  ElementType type = ElementType::kUInt8;
  char* data = nullptr;  // the whole tensor
  std::vector<OwnedSlice> slices;
};

// out = sum over ranks, in rank order, of this rank's slice of `call.data`;
// only `out` is written. It may be the slice itself.
absl::Status SumSlices(const HostGroup& group, const SlicedCall& call,
                       char* out);

// Writes every slice that is not this rank's own to `call.data`, from its
// owner. Each crosses to each other host once.
absl::Status GatherSlices(const HostGroup& group, const SlicedCall& call);

}  // namespace tessera
#endif  // COMM_HIERARCHICAL_HIERARCHICAL_OPS_H_
