#include "comm/shm_communicator.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/announcements.h"
#include "comm/element_type.h"
#include "comm/queued_communicator.h"
#include "comm/shm/collectives.h"
#include "comm/shm/meeting.h"
#include "comm/shm/team.h"
#include "comm/wait_monitor.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

// How long ranks in different collectives wait for one to say why.
constexpr absl::Duration kCauseWait = absl::Milliseconds(300);

class ShmCommunicator : public QueuedCommunicator {
 public:
  ShmCommunicator(const ShmCommunicatorOptions& options,
                  std::unique_ptr<Announcements> board,
                  std::unique_ptr<shm::HostMemory> memory)
      : QueuedCommunicator(options.rank, options.world_size),
        board_(std::move(board)),
        memory_(std::move(memory)),
        team_(options.rank, memory_->members()),
        collectives_(&team_, memory_->heap_bytes()),
        monitor_(board_.get(),
                 {options.collective_timeout, options.announce_grace},
                 [this] { team_.Abort(absl::CancelledError("aborted")); }) {}

  absl::string_view backend() const override { return "shm"; }
  void Announce(const absl::Status& status) override {
    board_->Say(board_->FailedHere(status), /*final=*/false);
  }
  bool AllAnnounced(absl::Duration timeout) override {
    return board_->AllSaid(timeout);
  }
  void ClearAnnouncement() override { board_->TakeBack(); }

 protected:
  absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                           const at::Tensor& whole) override {
    if (!whole.is_cpu()) {
      at::Tensor host = at::empty(whole.sizes(), whole.dtype());
      TESSERA_RETURN_IF_ERROR(DoAllGather(call, shard.cpu(), host));
      whole.copy_(host);
      return absl::OkStatus();
    }
    return Watched(call, [&] {
      return collectives_.AllGather(call.what, shard.const_data_ptr(),
                                    whole.mutable_data_ptr(),
                                    static_cast<int64_t>(shard.nbytes()));
    });
  }
  absl::Status DoReduceScatterSum(const Call& call, const at::Tensor& whole,
                                  const at::Tensor& shard) override {
    if (!whole.is_cpu()) {
      at::Tensor host = at::empty(shard.sizes(), shard.dtype());
      TESSERA_RETURN_IF_ERROR(DoReduceScatterSum(call, whole.cpu(), host));
      shard.copy_(host);
      return absl::OkStatus();
    }
    TESSERA_ASSIGN_OR_RETURN(const auto type,
                             ElementTypeOf(whole.scalar_type()));
    return Watched(call, [&] {
      return collectives_.ReduceScatter(
          call.what, type, shm::ReduceOp::kSum, whole.const_data_ptr(),
          shard.mutable_data_ptr(), shard.numel());
    });
  }
  absl::Status DoAllReduceSum(const Call& call,
                              const at::Tensor& tensor) override {
    if (!tensor.is_cpu()) {
      at::Tensor host = tensor.cpu();
      TESSERA_RETURN_IF_ERROR(DoAllReduceSum(call, host));
      tensor.copy_(host);
      return absl::OkStatus();
    }
    TESSERA_ASSIGN_OR_RETURN(const auto type,
                             ElementTypeOf(tensor.scalar_type()));
    return Watched(call, [&] {
      return collectives_.AllReduce(call.what, type, shm::ReduceOp::kSum,
                                    tensor.mutable_data_ptr(), tensor.numel());
    });
  }
  absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                           int root) override {
    if (!tensor.is_cpu()) {
      at::Tensor host = tensor.cpu();
      TESSERA_RETURN_IF_ERROR(DoBroadcast(call, host, root));
      tensor.copy_(host);
      return absl::OkStatus();
    }
    return Watched(call, [&] {
      return collectives_.Broadcast(call.what, tensor.mutable_data_ptr(),
                                    static_cast<int64_t>(tensor.nbytes()),
                                    root);
    });
  }
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override {
    std::vector<std::string> texts;
    TESSERA_RETURN_IF_ERROR(Watched(call, [&] {
      return collectives_.AllGatherTexts(call.what, mine, &texts);
    }));
    return texts;
  }

 private:
  absl::Status Watched(const Call& call,
                       const std::function<absl::Status()>& body) {
    monitor_.Begin({call.sequence, call.signature, call.what, call.details});
    absl::Status status = CatchTorch("shm", body);
    const std::vector<absl::Duration> waits = team_.TakeWaits();
    for (int peer = 0; peer < world_size(); ++peer) {
      if (waits[peer] > absl::ZeroDuration()) NoteWait(peer, waits[peer]);
    }
    if (absl::IsFailedPrecondition(status)) {
      status = WithTheCause(status);
    } else if (!status.ok()) {
      status = Annotate(status, call.what);
    }
    return monitor_.End(status);
  }

  // A rank that failed is soon in another collective than the others: what it
  // announces says more than that.
  absl::Status WithTheCause(const absl::Status& mismatch) {
    const absl::Time until = absl::Now() + kCauseWait;
    do {
      const std::vector<Announcement> said = board_->Read();
      if (!said.empty()) return said.front().status;
      if (board_->speaking()) return board_->words();
      absl::SleepFor(absl::Milliseconds(10));
    } while (absl::Now() < until);
    return mismatch;
  }

  const std::unique_ptr<Announcements> board_;
  const std::unique_ptr<shm::HostMemory> memory_;
  shm::Team team_;
  shm::Collectives collectives_;
  WaitMonitor monitor_;  // last: it uses the others
};

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeShmCommunicator(
    c10::intrusive_ptr<c10d::Store> store,
    const ShmCommunicatorOptions& options) {
  if (options.world_size > shm::kMaxRanks) {
    return absl::UnavailableError(absl::StrCat("shm carries at most ",
                                               shm::kMaxRanks, " ranks, there ",
                                               "are ", options.world_size));
  }
  std::unique_ptr<shm::HostMemory> memory;
  TESSERA_RETURN_IF_ERROR(CatchTorch("store", [&]() -> absl::Status {
    c10d::PrefixStore keys("shm", store);
    TESSERA_ASSIGN_OR_RETURN(
        memory, shm::MeetOnHost(keys, options.rank, options.world_size,
                                options.connect_timeout));
    return absl::OkStatus();
  }));
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<Announcements> board,
      Announcements::Create(store, options.rank, options.world_size,
                            /*same_host=*/true));
  return std::shared_ptr<Communicator>(std::make_shared<ShmCommunicator>(
      options, std::move(board), std::move(memory)));
}

}  // namespace tessera
