// ShmBackend: what MakeShmBackend gives (comm/shm_backend.h).
#ifndef COMM_SHM_BACKEND_IMPL_H_
#define COMM_SHM_BACKEND_IMPL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/comm_thread.h"
#include "comm/group_options.h"
#include "comm/shm/channels.h"
#include "comm/shm/collectives.h"
#include "comm/shm_backend_arguments.h"
#include "comm/shm_group.h"
#include "comm/shm_work.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ShmBackend : public c10d::Backend {
 public:
  ShmBackend(const GroupOptions& options, std::unique_ptr<CommThread> thread,
             std::shared_ptr<ShmGroup> group);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(
        "shm", absl::ToChronoMilliseconds(options_.collective_timeout));
  }

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options,
                        bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void abort() override;
  void shutdown() override;

 private:
  using Operation = ShmGroup::Operation;
  WorkPtr Submit(c10d::OpType type, CollectiveRecord record, Tensors outputs,
                 Operation operation);
  // Of `count` calls, as one.
  WorkPtr Together(size_t count, const std::function<WorkPtr(size_t)>& call);
  c10::intrusive_ptr<ShmWork> NewWork(c10d::OpType type, Tensors outputs);
  WorkPtr AllGather(c10d::OpType type, Tensors outputs, at::Tensor input);
  WorkPtr ReduceScatter(c10d::OpType type, at::Tensor output, Tensors inputs,
                        const c10d::ReduceOp& reduce);
  WorkPtr AllToAll(c10d::OpType type, Tensors outputs, Tensors inputs);
  WorkPtr Receive(const char* op, c10d::OpType type, Tensors& tensors, int from,
                  int tag);

  static void Close(CommThread* thread, ShmGroup* group,
                    shm::Channels* channels, const absl::Status& why);

  const GroupOptions options_;
  absl::Status closed_;  // of the user's thread
  std::unique_ptr<CommThread> thread_;
  std::shared_ptr<ShmGroup> group_;
  std::unique_ptr<shm::Channels> channels_;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<ShmWork>> coalesced_;
};

}  // namespace tessera
#endif  // COMM_SHM_BACKEND_IMPL_H_
