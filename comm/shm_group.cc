#include "comm/shm_group.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/element_type.h"
#include "comm/shm_communicator.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

absl::StatusOr<std::shared_ptr<ShmGroup>> ShmGroup::Make(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options,
    CommThread* thread) {
  // First: when all have met, what each has put there can be read.
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Family> family,
                           Family::Join(store, options, /*same_host=*/true));
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<ShmMemory> memory,
      MeetInMemory(c10::make_intrusive<c10d::PrefixStore>("shm", store),
                   options.rank, options.world_size, options.connect_timeout,
                   options.first_ranks));
  return std::make_shared<ShmGroup>(options, std::move(family),
                                    std::move(memory), thread);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeShmCommunicator(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options) {
  return ShmGroup::Make(std::move(store), options);
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

absl::Status ShmGroup::HostReduceScatterSum(const Call& call,
                                            const at::Tensor& whole,
                                            const at::Tensor& shard) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(whole.scalar_type()));
  return RunWatched(call, [&](shm::Collectives& all, const std::string& what) {
    return all.ReduceScatter(what, type, shm::ReduceOp::kSum,
                             whole.const_data_ptr(), shard.mutable_data_ptr(),
                             shard.numel());
  });
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
