// comm/nccl/nccl_communicator.h in a build without CUDA.
#include "comm/nccl/nccl_communicator.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

bool BuiltWithNccl() { return false; }

std::vector<std::string> VisibleGpus() { return {}; }

absl::StatusOr<std::shared_ptr<Communicator>> MakeNcclCommunicator(
    const c10::intrusive_ptr<c10d::Store>&, const NcclCommunicatorOptions&,
    std::shared_ptr<FailureDomain>, std::shared_ptr<QueuedCommunicator>) {
  return absl::UnimplementedError("this build has no CUDA, so no nccl backend");
}

}  // namespace tessera
