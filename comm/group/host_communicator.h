// HostCommunicator: what the backends of CPU ranks share. They see tensors in
// host memory only; those of other devices go through a copy there.
#ifndef COMM_GROUP_HOST_COMMUNICATOR_H_
#define COMM_GROUP_HOST_COMMUNICATOR_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "comm/group/watched_communicator.h"

namespace tessera {

class HostCommunicator : public WatchedCommunicator {
 protected:
  using WatchedCommunicator::WatchedCommunicator;

  // As QueuedCommunicator's Do..., of CPU tensors.
  virtual absl::Status HostAllGather(const Call& call, const at::Tensor& shard,
                                     const at::Tensor& whole) = 0;
  virtual absl::Status HostReduceScatterSum(const Call& call,
                                            const at::Tensor& whole,
                                            const at::Tensor& shard) = 0;
  virtual absl::Status HostAllReduceSum(const Call& call,
                                        const at::Tensor& tensor) = 0;
  virtual absl::Status HostBroadcast(const Call& call, const at::Tensor& tensor,
                                     int root) = 0;

 private:
  absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                           const at::Tensor& whole) final;
  absl::Status DoReduceScatterSum(const Call& call, const at::Tensor& whole,
                                  const at::Tensor& shard) final;
  absl::Status DoAllReduceSum(const Call& call, const at::Tensor& tensor) final;
  absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                           int root) final;
};

}  // namespace tessera
#endif  // COMM_GROUP_HOST_COMMUNICATOR_H_
