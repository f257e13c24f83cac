#include "comm/shm/shm_group.h"

#include <unistd.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/memory/memfd.h"
#include "base/status.h"
#include "comm/reduce/element_type.h"
#include "comm/shm/arena.h"
#include "comm/shm/descriptors.h"
#include "comm/shm/shm_communicator.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

absl::StatusOr<std::shared_ptr<ShmGroup>> ShmGroup::Make(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options,
    CommThread* thread) {
  // First: when all have met, what each has put there can be read.
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, /*same_host=*/true));
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<ShmMemory> memory,
      ConnectShm(c10::make_intrusive<c10d::PrefixStore>("shm", store),
                 options.rank, options.world_size, options.connect_timeout,
                 options.first_ranks));
  return std::make_shared<ShmGroup>(options, std::move(domain),
                                    std::move(memory), thread);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeShmCommunicator(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options) {
  return ShmGroup::Make(std::move(store), options);
}

// Rank 0 makes it, and gives the others its descriptor.
absl::StatusOr<std::unique_ptr<SharedMemory>> ShmGroup::ShareMemory(
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

CommFuture ShmGroup::Submit(CollectiveRecord record, CommTag tag,
                            Operation operation, Done done) {
  return Enqueue(
      std::move(record), std::move(tag),
      [this, operation = std::move(operation)](const Call& call) {
        return RunWatched(call, operation);
      },
      std::move(done));
}

absl::Status ShmGroup::RunWatched(const Call& call,
                                  const Operation& operation) {
  return Watched(call, [&] {
    // The details too: ranks whose dtypes differ are in different collectives.
    const absl::Status status = operation(
        memory_->collectives, absl::StrCat(call.what, " (", call.details, ")"));
    const std::vector<absl::Duration> waits = memory_->team.TakeWaits();
    for (int peer = 0; peer < world_size(); ++peer) {
      if (waits[peer] > absl::ZeroDuration()) NoteWait(peer, waits[peer]);
    }
    return status;
  });
}

absl::Status ShmGroup::HostAllGather(const Call& call, const at::Tensor& shard,
                                     const at::Tensor& whole) {
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.AllGather(what, shard.const_data_ptr(), whole.mutable_data_ptr(),
                         static_cast<int64_t>(shard.nbytes()));
  });
}

absl::Status ShmGroup::ReduceScatter(const Call& call, const at::Tensor& whole,
                                     const at::Tensor& shard, bool averages) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(whole.scalar_type()));
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.ReduceScatter(what, type, shm::ReduceOp::kSum,
                             whole.const_data_ptr(), shard.mutable_data_ptr(),
                             shard.numel(), averages);
  });
}

absl::Status ShmGroup::HostReduceScatterSum(const Call& call,
                                            const at::Tensor& whole,
                                            const at::Tensor& shard) {
  return ReduceScatter(call, whole, shard, /*averages=*/false);
}

absl::Status ShmGroup::DoReduceScatter(const Call& call,
                                       const at::Tensor& whole,
                                       const at::Tensor& shard,
                                       double divisor) {
  // In one pass; of 16-bit elements an average would be rounded only once.
  const bool averages =
      whole.is_cpu() && divisor == world_size() &&
      (whole.scalar_type() == at::kFloat || whole.scalar_type() == at::kDouble);
  return averages
             ? ReduceScatter(call, whole, shard, averages)
             : HostCommunicator::DoReduceScatter(call, whole, shard, divisor);
}

absl::Status ShmGroup::HostAllReduceSum(const Call& call,
                                        const at::Tensor& tensor) {
  TESSERA_ASSIGN_OR_RETURN(const auto type,
                           ElementTypeOf(tensor.scalar_type()));
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.AllReduce(what, type, shm::ReduceOp::kSum,
                         tensor.mutable_data_ptr(), tensor.numel());
  });
}

absl::Status ShmGroup::HostBroadcast(const Call& call, const at::Tensor& tensor,
                                     int root) {
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.Broadcast(what, tensor.mutable_data_ptr(),
                         static_cast<int64_t>(tensor.nbytes()), root);
  });
}

absl::StatusOr<std::vector<std::string>> ShmGroup::DoAllGatherStrings(
    const Call& call, const std::string& mine) {
  std::vector<std::string> texts;
  TESSERA_RETURN_IF_ERROR(
      RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
        return all.AllGatherTexts(what, mine, &texts);
      }));
  return texts;
}

}  // namespace tessera
