#include "comm/shm/shm_transport.h"

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
#include "comm/reduce/element_type.h"
#include "comm/shm/collectives.h"
#include "comm/shm/descriptors.h"
#include "comm/shm/shm_memory.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

absl::Status MoveParts(shm::Collectives& all, const CommCall& call) {
  const MovedParts parts = PartsOf(call, all.exchange().size());
  std::vector<const char*> in;
  std::vector<char*> out;
  for (const at::Tensor& t : parts.sent) {
    in.push_back(t.defined() ? static_cast<const char*>(t.const_data_ptr())
                             : nullptr);
  }
  for (const at::Tensor& t : parts.received) {
    out.push_back(t.defined() ? static_cast<char*>(t.mutable_data_ptr())
                              : nullptr);
  }
  return all.MoveParts(call.Name(), call.op, in, out, parts.bytes);
}

class ShmTransport : public Transport {
 public:
  ShmTransport(std::shared_ptr<ShmMemory> memory,
               absl::Duration connect_timeout)
      : memory_(std::move(memory)), connect_timeout_(connect_timeout) {}

  absl::string_view name() const override { return "shm"; }
  Capabilities capabilities() const override {
    Capabilities can;
    can.shared_memory = true;
    return can;
  }
  void Listen(WaitListener listener) override {
    waited_ = std::move(listener.waited);
    memory_->Watch(std::move(listener.names), std::move(listener.awaited),
                   std::move(listener.end_of));
  }
  absl::Status Run(const CommCall& call) override {
    const absl::Status status = RunIn(memory_->collectives, call);
    memory_->team.TakeWaits(waited_);
    return status;
  }
  void Abort() override {
    memory_->team.Abort(absl::CancelledError("aborted"));
  }
  absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      Communicator* group, int64_t bytes, const CommTag& tag) override;

 private:
  absl::Status RunIn(shm::Collectives& all, const CommCall& call);
  absl::Status ReduceScatter(shm::Collectives& all, const CommCall& call);

  const std::shared_ptr<ShmMemory> memory_;
  const absl::Duration connect_timeout_;
  std::function<void(int, absl::Duration)> waited_;
};

// Rank 0 makes it, and gives the others its descriptor.
absl::StatusOr<std::unique_ptr<SharedMemory>> ShmTransport::ShareMemory(
    Communicator* group, int64_t bytes, const CommTag& tag) {
  int fd = -1;
  const absl::Cleanup close_fd = [&fd] {
    if (fd >= 0) close(fd);
  };
  std::unique_ptr<shm::DescriptorOffer> offer;
  auto make = [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(fd, MakeMemfd("tessera-shared", bytes));
    TESSERA_ASSIGN_OR_RETURN(
        offer, shm::DescriptorOffer::Start({fd}, "m", group->world_size()));
    return absl::OkStatus();
  };
  absl::Status mine;
  if (group->rank() == 0) mine = make();
  TESSERA_ASSIGN_OR_RETURN(
      const auto names,
      group->AllGatherStrings(offer == nullptr ? "" : offer->name(), tag));
  if (group->rank() != 0 && !names[0].empty()) {
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
  TESSERA_RETURN_IF_ERROR(group->AgreeOk(mine, tag.what));
  return memory;
}

absl::Status ShmTransport::RunIn(shm::Collectives& all, const CommCall& call) {
  // The details too: ranks whose dtypes differ are in different collectives.
  const std::string what = call.Name();
  switch (call.op) {
    case CollectiveOp::kAllGather:
      return all.AllGather(what, call.in.const_data_ptr(),
                           call.out.mutable_data_ptr(),
                           static_cast<int64_t>(call.in.nbytes()));
    case CollectiveOp::kReduceScatter:
      return ReduceScatter(all, call);
    case CollectiveOp::kAllReduce: {
      TESSERA_ASSIGN_OR_RETURN(const auto type,
                               ElementTypeOf(call.out.scalar_type()));
      return all.AllReduce(what, type, call.out.mutable_data_ptr(),
                           call.out.numel());
    }
    case CollectiveOp::kBroadcast:
      return all.Broadcast(what, call.out.mutable_data_ptr(),
                           static_cast<int64_t>(call.out.nbytes()), call.root);
    case CollectiveOp::kText:
      return all.AllGatherTexts(what, call.text, call.texts);
    default:
      return MoveParts(all, call);
  }
}

absl::Status ShmTransport::ReduceScatter(shm::Collectives& all,
                                         const CommCall& call) {
  TESSERA_ASSIGN_OR_RETURN(const auto type,
                           ElementTypeOf(call.out.scalar_type()));
  // In one pass; of 16-bit elements an average would be rounded only once.
  const bool averages =
      call.divisor == memory_->team.size() &&
      (type == ElementType::kFloat32 || type == ElementType::kFloat64);
  TESSERA_RETURN_IF_ERROR(all.ReduceScatter(
      call.Name(), type, averages ? ReduceOp::kAverage : ReduceOp::kSum,
      call.in.const_data_ptr(), call.out.mutable_data_ptr(), call.out.numel()));
  if (!averages) DivideBy(call.out, call.divisor);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> ConnectShmTransport(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<ShmMemory> memory,
      ConnectShm(c10::make_intrusive<c10d::PrefixStore>("shm", store),
                 options.rank, options.world_size, options.connect_timeout,
                 options.first_ranks));
  return std::make_shared<ShmTransport>(std::move(memory),
                                        options.connect_timeout);
}

}  // namespace tessera
