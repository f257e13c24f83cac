// The c10d backend "shm": collectives and messages of CPU ranks on one host,
// for those who write against c10d.
//
//   auto backend = MakeShmBackend(store, options);
//   (*backend)->allreduce(tensors)->wait();
//   process_group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM, *backend);
//
// All of c10d's operations but sparse ones, for dense CPU tensors of any
// stride; one tensor to a call (but the coalesced forms and lists). Moves take
// every dtype. Reductions take bool, integers, float16, bfloat16, float32,
// float64 with SUM, AVG, MIN, MAX, PRODUCT, and complex ones with SUM and AVG.
//
// Sums run in rank order, 16-bit types in float32 and rounded once: the same
// bits at every size and on every rank. Averages are sums divided at the end;
// those of integers are truncated toward zero.
//
// Inputs and outputs lie apart, but for a rank's own part of an all-gather,
// gather, scatter or reduce-scatter, which may be in place.
//
// Collectives of one backend run one after the other, on a thread of its own,
// in the order of the calls, which must be the same on all ranks: ranks in
// different collectives get an error at once. Messages go their own way; send
// is through when the message is received, or short (4 KiB) and on its way.
//
// Memory from allocateTensor is mapped by all ranks: collectives on it copy
// once or not at all. Other memory is staged, unless it is counted memory of
// 128 KiB or more (base/memory.h).
//
// Errors: a bad argument throws at the call. A Work fails with
// c10::DistBackendError where a rank has ended, has not come within the timeout
// (per-call timeouts are not used), or is in another collective; its message
// names the rank and the collective. After a collective has failed all later
// ones fail, and after a message has timed out all later messages. A receive of
// another size than its message fails alone.
//
// monitoredBarrier is a barrier: the group's timeout tells who has not come.
// The destructor and shutdown end messages at once, and wait 5 s at most for
// others in collectives that were begun; abort does not wait.
#ifndef COMM_SHM_BACKEND_H_
#define COMM_SHM_BACKEND_H_

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group_options.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

// COLLECTIVE, blocking, for 1 to 64 ranks of one host. `store` must hold keys
// of this backend only. Returns Unavailable, on all ranks alike, if they cannot
// share memory.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeShmBackend(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options);

}  // namespace tessera
#endif  // COMM_SHM_BACKEND_H_
