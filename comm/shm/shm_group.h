// ShmGroup: the ranks of one host in one group; what ShmCommunicator and the
// c10d backend are made of. Collectives in memory that all of them map
// (comm/shm/collectives.h), queued, watched and recorded as those of every
// communicator are.
#ifndef COMM_SHM_SHM_GROUP_H_
#define COMM_SHM_SHM_GROUP_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group/host_communicator.h"
#include "comm/group_options.h"
#include "comm/shm/collectives.h"
#include "comm/shm/shm_memory.h"

namespace c10d {
class Store;
}

namespace tessera {

class ShmGroup : public HostCommunicator {
 public:
  using Operation =
      std::function<absl::Status(shm::Collectives&, const std::string& what)>;

  // As MakeShmCommunicator (comm/shm/shm_communicator.h). `thread` outlives it;
  // null: the process's own.
  static absl::StatusOr<std::shared_ptr<ShmGroup>> Make(
      c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options,
      CommThread* thread = nullptr);

  ShmGroup(const GroupOptions& options, std::shared_ptr<FailureDomain> domain,
           std::shared_ptr<ShmMemory> memory, CommThread* thread)
      : HostCommunicator(
            options, std::move(domain),
            [memory] { memory->team.Abort(absl::CancelledError("aborted")); },
            thread),
        memory_(std::move(memory)),
        connect_timeout_(options.connect_timeout) {
    memory_->collectives.exchange().SetNames(names());
    memory_->team.SetOnSleep([this](int peer) { SetAwaited(peer); });
    memory_->team.SetGone([this](int peer) {
      return memory_->team.HasLeft(peer) ? HasEnded(names()[peer], true)
                                         : EndOf(peer);
    });
  }

  absl::string_view backend() const override { return "shm"; }
  ShmMemory& memory() { return *memory_; }
  absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      int64_t bytes, CommTag tag) override;

  // Any operation; `record` says what it is. `done` is told how it ended.
  // COLLECTIVE, ASYNC.
  CommFuture Submit(CollectiveRecord record, CommTag tag, Operation operation,
                    Done done);

 protected:
  absl::Status HostAllGather(const Call& call, const at::Tensor& shard,
                             const at::Tensor& whole) override;
  absl::Status HostReduceScatterSum(const Call& call, const at::Tensor& whole,
                                    const at::Tensor& shard) override;
  absl::Status DoReduceScatter(const Call& call, const at::Tensor& whole,
                               const at::Tensor& shard,
                               double divisor) override;
  absl::Status HostAllReduceSum(const Call& call,
                                const at::Tensor& tensor) override;
  absl::Status HostBroadcast(const Call& call, const at::Tensor& tensor,
                             int root) override;
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override;

 private:
  absl::Status ReduceScatter(const Call& call, const at::Tensor& whole,
                             const at::Tensor& shard, bool averages);
  absl::Status RunWatched(const Call& call, const Operation& operation);

  const std::shared_ptr<ShmMemory> memory_;
  const absl::Duration connect_timeout_;
};

}  // namespace tessera
#endif  // COMM_SHM_SHM_GROUP_H_
