// SlotExchange: collectives as copies through the slots of a PeerMemory, a
// chunk at a time, without arithmetic.
//
//   chunk k, slot k % 2   every rank, on its stream
//     come after the others' reads of chunk k - 2
//     copy the own input into the own slot; mark it written
//   the ranks meet, on their hosts
//     come after the others' writes of chunk k
//     copy from their slots to the output; mark them read
//
// Memory is of a device, and nothing here waits for that: what blocks is the
// meeting, and that for the other hosts only.
//
// All ranks call the same, with the same sizes, in the same order. After an
// error no more may be called. Threads: one at a time.
#ifndef COMM_CUDA_IPC_SLOT_EXCHANGE_H_
#define COMM_CUDA_IPC_SLOT_EXCHANGE_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/cuda_ipc/peer_memory.h"

namespace tessera {

// Returns when all ranks have called it as often as this one; an error if one
// of them never will. COLLECTIVE.
using Meeting = std::function<absl::Status()>;

class SlotExchange {
 public:
  // `memory` is borrowed and outlives this.
  SlotExchange(PeerMemory* memory, Meeting meet);

  // out [W * bytes] = the ranks' in [bytes]; `in` may be the own part of `out`.
  absl::Status AllGather(const char* in, int64_t bytes, char* out);
  // out[r] [bytes] = in[this rank] [bytes] of rank r, for all r whose out[r] is
  // not null; then that in[] of rank r is not null either. No part of `out`
  // overlaps any of `in`.
  absl::Status AllToAll(absl::Span<const char* const> in, int64_t bytes,
                        absl::Span<char* const> out);
  // data [bytes] = that of rank `root`.
  absl::Status Broadcast(char* data, int64_t bytes, int root);

 private:
  // One chunk, by what this rank writes to the own slot and reads of others'.
  struct Chunk {
    bool writes = true;
    std::function<absl::Status(int slot)> put;
    int only_from = -1;  // reads of this rank alone; -1: of all others
    std::function<absl::Status(int rank, int slot)> get;
  };
  absl::Status Run(const Chunk& chunk);
  // `others(r)` for all ranks but this one, beginning with the next.
  absl::Status ForOthers(const std::function<absl::Status(int rank)>& each);

  PeerMemory* const memory_;
  const Meeting meet_;
  int64_t chunks_ = 0;
};

}  // namespace tessera
#endif  // COMM_CUDA_IPC_SLOT_EXCHANGE_H_
