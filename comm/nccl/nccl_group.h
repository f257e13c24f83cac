// Makes c10d's group of NCCL, whose class is in libtorch's CUDA library
// (base/stream/cuda_library.h): no program is linked to its constructor.
#ifndef COMM_NCCL_NCCL_GROUP_H_
#define COMM_NCCL_NCCL_GROUP_H_

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

// LOCAL: the group connects at its first call. It is of the current device and
// has no timeout. Returns FailedPrecondition where the library, or what it
// needs, is missing, and InvalidArgument where there is no GPU.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> NewNcclGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size);

}  // namespace tessera
#endif  // COMM_NCCL_NCCL_GROUP_H_
