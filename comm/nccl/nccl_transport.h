// The transport of GPU ranks, each with a GPU of its own: c10d's NCCL.
//
// Sums: in rank order by default, through an all-to-all and a kernel of ours,
// so that they have the bits that gloo gives. With ordered_sums off NCCL sums
// while it moves, in an order of its own, which depends on the world's shape.
// NCCL makes a communicator, with its memory, when it is first used.
#ifndef COMM_NCCL_NCCL_TRANSPORT_H_
#define COMM_NCCL_NCCL_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/transport.h"

namespace c10d {
class Store;
}

namespace tessera {

struct NcclOptions {
  int rank = 0;
  int world_size = 1;
  int device = 0;  // this rank's GPU, which no other rank uses
  bool ordered_sums = true;
  // Sums have a communicator of their own, beside gathers: identical on all
  // ranks. REQUIRES: StartInHostOrder (comm/nccl/nccl_environment.h).
  bool sums_apart = false;
};

// True if this build has CUDA and NCCL.
bool BuiltWithNccl();

// A name for each GPU that this process sees, by device index; the same GPU has
// the same name in every process of its host. Empty without CUDA. LOCAL.
std::vector<std::string> VisibleGpus();

// COLLECTIVE, blocking. `store` must hold keys of this group only; `host` is as
// of MakeDeviceTransport (comm/device/device_transport.h). Returns
// Unimplemented in a build without CUDA.
absl::StatusOr<std::shared_ptr<Transport>> ConnectNcclTransport(
    const c10::intrusive_ptr<c10d::Store>& store, const NcclOptions& options,
    std::shared_ptr<Transport> host);

}  // namespace tessera
#endif  // COMM_NCCL_NCCL_TRANSPORT_H_
