#include "comm/shm/shm_communicator.h"

#include <unistd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/memory/memfd.h"
#include "base/status.h"
#include "base/torch/divide.h"
#include "comm/group/watched_communicator.h"
#include "comm/reduce/element_type.h"
#include "comm/shm/collectives.h"
#include "comm/shm/descriptors.h"
#include "comm/shm/shm_memory.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

class ShmCommunicator : public WatchedCommunicator {
 public:
  ShmCommunicator(const GroupOptions& options,
                  std::shared_ptr<FailureDomain> domain,
                  std::shared_ptr<ShmMemory> memory)
      : WatchedCommunicator(
            options, std::move(domain),
            [memory] { memory->team.Abort(absl::CancelledError("aborted")); },
            TensorsSeen::kOnHost),
        memory_(std::move(memory)),
        connect_timeout_(options.connect_timeout) {
    memory_->Watch(
        names(), [this](int peer) { SetAwaited(peer); },
        [this](int peer) { return EndOf(peer); });
  }

  absl::string_view backend() const override { return "shm"; }
  absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      int64_t bytes, CommTag tag) override;

 protected:
  absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                           const at::Tensor& whole) override;
  absl::Status DoReduceScatter(const Call& call, const at::Tensor& whole,
                               const at::Tensor& shard,
                               double divisor) override;
  absl::Status DoAllReduceSum(const Call& call,
                              const at::Tensor& tensor) override;
  absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                           int root) override;
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override;

 private:
  using Operation =
      std::function<absl::Status(shm::Collectives&, const std::string& what)>;
  absl::Status RunWatched(const Call& call, const Operation& operation);

  const std::shared_ptr<ShmMemory> memory_;
  const absl::Duration connect_timeout_;
};

// Rank 0 makes it, and gives the others its descriptor.
absl::StatusOr<std::unique_ptr<SharedMemory>> ShmCommunicator::ShareMemory(
    int64_t bytes, CommTag tag) {
  int fd = -1;
  const absl::Cleanup close_fd = [&fd] {
    if (fd >= 0) close(fd);
  };
  std::unique_ptr<shm::DescriptorOffer> offer;
  auto make = [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(fd, MakeMemfd("tessera-shared", bytes));
    TESSERA_ASSIGN_OR_RETURN(
        offer, shm::DescriptorOffer::Start({fd}, "m", world_size()));
    return absl::OkStatus();
  };
  absl::Status mine;
  if (rank() == 0) mine = make();
  TESSERA_ASSIGN_OR_RETURN(
      const auto names,
      AllGatherStrings(offer == nullptr ? "" : offer->name(), tag));
  if (rank() != 0 && !names[0].empty()) {
    std::string message(1, 0);
    std::vector<int> descriptors(1);
    mine = shm::TakeDescriptors(names[0], connect_timeout_, &message,
                                &descriptors);
    if (mine.ok()) fd = descriptors[0];
  }
  std::unique_ptr<SharedMemory> memory;
  if (mine.ok() && fd >= 0) {
    auto mapped = SharedMemory::Map(fd, bytes);
    mine = mapped.status();
    if (mapped.ok()) memory = *std::move(mapped);
  }
  TESSERA_RETURN_IF_ERROR(AgreeOk(mine, tag.what));
  return memory;
}

absl::Status ShmCommunicator::RunWatched(const Call& call,
                                         const Operation& operation) {
  return Watched(call, [&] {
    // The details too: ranks whose dtypes differ are in different collectives.
    const absl::Status status = operation(
        memory_->collectives, absl::StrCat(call.what, " (", call.details, ")"));
    memory_->team.TakeWaits(
        [this](int peer, absl::Duration waited) { NoteWait(peer, waited); });
    return status;
  });
}

absl::Status ShmCommunicator::DoAllGather(const Call& call,
                                          const at::Tensor& shard,
                                          const at::Tensor& whole) {
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.AllGather(what, shard.const_data_ptr(), whole.mutable_data_ptr(),
                         static_cast<int64_t>(shard.nbytes()));
  });
}

absl::Status ShmCommunicator::DoReduceScatter(const Call& call,
                                              const at::Tensor& whole,
                                              const at::Tensor& shard,
                                              double divisor) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(whole.scalar_type()));
  // In one pass; of 16-bit elements an average would be rounded only once.
  const bool averages =
      divisor == world_size() &&
      (type == ElementType::kFloat32 || type == ElementType::kFloat64);
  TESSERA_RETURN_IF_ERROR(
      RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
        return all.ReduceScatter(
            what, type, averages ? ReduceOp::kAverage : ReduceOp::kSum,
            whole.const_data_ptr(), shard.mutable_data_ptr(), shard.numel());
      }));
  if (!averages) DivideBy(shard, divisor);
  return absl::OkStatus();
}

absl::Status ShmCommunicator::DoAllReduceSum(const Call& call,
                                             const at::Tensor& tensor) {
  TESSERA_ASSIGN_OR_RETURN(const auto type,
                           ElementTypeOf(tensor.scalar_type()));
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.AllReduce(what, type, tensor.mutable_data_ptr(), tensor.numel());
  });
}

absl::Status ShmCommunicator::DoBroadcast(const Call& call,
                                          const at::Tensor& tensor, int root) {
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.Broadcast(what, tensor.mutable_data_ptr(),
                         static_cast<int64_t>(tensor.nbytes()), root);
  });
}

absl::StatusOr<std::vector<std::string>> ShmCommunicator::DoAllGatherStrings(
    const Call& call, const std::string& mine) {
  std::vector<std::string> texts;
  TESSERA_RETURN_IF_ERROR(
      RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
        return all.AllGatherTexts(what, mine, &texts);
      }));
  return texts;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeShmCommunicator(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options) {
  // First: when all are connected, what each has put there can be read.
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, /*same_host=*/true));
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<ShmMemory> memory,
      ConnectShm(c10::make_intrusive<c10d::PrefixStore>("shm", store),
                 options.rank, options.world_size, options.connect_timeout,
                 options.first_ranks));
  return std::shared_ptr<Communicator>(std::make_shared<ShmCommunicator>(
      options, std::move(domain), std::move(memory)));
}

}  // namespace tessera
