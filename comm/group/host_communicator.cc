#include "comm/group/host_communicator.h"

#include "ATen/ops/empty.h"
#include "base/status.h"

namespace tessera {

absl::Status HostCommunicator::DoAllGather(const Call& call,
                                           const at::Tensor& shard,
                                           const at::Tensor& whole) {
  if (whole.is_cpu()) return HostAllGather(call, shard, whole);
  at::Tensor host = at::empty(whole.sizes(), whole.dtype());
  TESSERA_RETURN_IF_ERROR(HostAllGather(call, shard.cpu(), host));
  whole.copy_(host);
  return absl::OkStatus();
}

absl::Status HostCommunicator::DoReduceScatterSum(const Call& call,
                                                  const at::Tensor& whole,
                                                  const at::Tensor& shard) {
  if (whole.is_cpu()) return HostReduceScatterSum(call, whole, shard);
  at::Tensor host = at::empty(shard.sizes(), shard.dtype());
  TESSERA_RETURN_IF_ERROR(HostReduceScatterSum(call, whole.cpu(), host));
  shard.copy_(host);
  return absl::OkStatus();
}

absl::Status HostCommunicator::DoAllReduceSum(const Call& call,
                                              const at::Tensor& tensor) {
  if (tensor.is_cpu()) return HostAllReduceSum(call, tensor);
  at::Tensor host = tensor.cpu();
  TESSERA_RETURN_IF_ERROR(HostAllReduceSum(call, host));
  tensor.copy_(host);
  return absl::OkStatus();
}

absl::Status HostCommunicator::DoBroadcast(const Call& call,
                                           const at::Tensor& tensor, int root) {
  if (tensor.is_cpu()) return HostBroadcast(call, tensor, root);
  at::Tensor host = tensor.cpu();
  TESSERA_RETURN_IF_ERROR(HostBroadcast(call, host, root));
  tensor.copy_(host);
  return absl::OkStatus();
}

}  // namespace tessera
