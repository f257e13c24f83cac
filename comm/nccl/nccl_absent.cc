// comm/nccl/nccl_transport.h in a build without CUDA.
#include "comm/nccl/nccl_transport.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

bool BuiltWithNccl() { return false; }

std::vector<std::string> VisibleGpus() { return {}; }

absl::StatusOr<std::shared_ptr<Transport>> ConnectNcclTransport(
    const c10::intrusive_ptr<c10d::Store>&, const NcclOptions&,
    std::shared_ptr<Transport>) {
  return absl::UnimplementedError("this build has no CUDA, so no nccl backend");
}

}  // namespace tessera
