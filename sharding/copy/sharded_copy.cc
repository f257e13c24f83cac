#include "sharding/copy/sharded_copy.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/stream/side_stream.h"
#include "base/stream/stream_point.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/StreamGuard.h"
#include "comm/comm_thread.h"
#include "offload/update_stream.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

bool InForward() { return torch::autograd::get_current_graph_task_id() == -1; }

// From pinned memory to a device, for this thread's current stream.
absl::Status CopyHere(const at::Tensor& from, const at::Tensor& to) {
  return CatchTorch("copy to a device", [&] {
    TorchScope scope;
    to.copy_(from, /*non_blocking=*/true);
  });
}

}  // namespace

ShardedCopy::ShardedCopy(const FlatDescription* flat, ShardStates* states,
                         Traits traits, std::atomic<int64_t>* live)
    : WorkingCopy(flat, states,
                  [&] {
                    traits.can_be_freed = true;
                    return traits;
                  }()),
      live_(live) {}

void ShardedCopy::Drop() {
  if (whole().defined()) DropWhole();
  WorkingCopy::Drop();
}

// Memory for the whole copy, and for what will be left of it: a rank to which
// that was refused later would gather from another place than the others.
absl::Status ShardedCopy::MakeWhole() {
  TESSERA_ASSIGN_OR_RETURN(FlatBuffer whole, AllocateWhole());
  TESSERA_RETURN_IF_ERROR(AllocateSecondary());
  SetWhole(std::move(whole));
  *live_ += flat_.layout().whole_numel();
  return absl::OkStatus();
}

absl::StatusOr<FlatBuffer> ShardedCopy::AllocateWhole() {
  return Allocate(flat_.layout().whole_numel(), MemoryKind::kWorking,
                  Fill::kNone);
}

void ShardedCopy::DropWhole() {
  SetWhole({});
  *live_ -= flat_.layout().whole_numel();
}

absl::Status ShardedCopy::StartGather() {
  TorchScope scope;
  const absl::Status allocated = MakeWhole();
  if (!allocated.ok()) {
    // The others wait for our part, here or in what comes after.
    flat_.communicator()->Announce(allocated);
    return allocated;
  }
  auto arriving = Launch();
  if (arriving.ok()) {
    arriving_ = *std::move(arriving);
  } else {
    DropWhole();
  }
  return arriving.status();
}

absl::Status ShardedCopy::AwaitArrival() {
  if (!arriving()) return absl::OkStatus();
  const absl::Status status = std::exchange(arriving_, std::nullopt)->Wait();
  if (!status.ok()) DropWhole();
  return status;
}

absl::Status ShardedCopy::PrepareReceive() {
  if (whole().defined()) return absl::OkStatus();
  TorchScope scope;
  return MakeWhole();
}

GatheredCopy::GatheredCopy(const FlatDescription* flat, ShardStates* states,
                           std::atomic<int64_t>* live)
    : GatheredCopy(
          flat, states,
          [&] {
            Traits traits;
            traits.gathers_together = true;
            traits.keeps_secondary = flat->options().reshard_group != nullptr;
            return traits;
          }(),
          live) {}

absl::StatusOr<CommFuture> GatheredCopy::Launch() {
  const bool near = secondary_holds_;
  CommTag tag{absl::StrCat(
      near ? "all-gather within a group of unit " : "all-gather of unit ",
      flat_.name())};
  if (near) {
    return flat_.options().reshard_group->AllGather(
        secondary_.Bytes(), whole().Bytes(), std::move(tag));
  }
  // On a device another stream may be current the next time, and has to wait.
  if (updated_.Done() && updated_.Wait().ok() && flat_.device().is_cpu()) {
    updated_ = CommFuture();
  }
  if (shard().on_disk()) return LaunchFromDisk(std::move(tag));
  if (shard().on_host()) return LaunchFromHost(std::move(tag));
  if (updated_.valid()) {
    tag.ready = [updated = updated_] { return updated.Wait(); };
  }
  return flat_.communicator()->AllGather(shard().memory().Bytes(),
                                         whole().Bytes(), std::move(tag));
}

// [S] of the host, that a device copies from; undefined on the CPU, where a
// read goes to its place itself.
absl::StatusOr<at::Tensor> GatheredCopy::MakeLanding() const {
  if (flat_.device().is_cpu()) return at::Tensor();
  return CatchTorch(shard().what(), [&] {
    return at::empty(
        {shard().numel()},
        at::TensorOptions(flat_.dtype()).device(at::kCPU).pinned_memory(true));
  });
}

absl::Status GatheredCopy::Reading::Wait() const {
  return fetch != nullptr ? fetch->Wait() : read.Wait();
}

// What is still being updated does not come from the disk.
absl::StatusOr<CommFuture> GatheredCopy::LaunchFromDisk(CommTag tag) {
  const Range owned = flat_.owned();
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor landing, MakeLanding());
  void* const place = landing.defined() ? landing.mutable_data_ptr()
                                        : whole().data(owned.begin);
  Reading reading;
  UpdateStream* const stream = flat_.options().stream.get();
  if (stream != nullptr) reading.fetch = stream->StartFetch(shard(), place);
  if (reading.fetch == nullptr) {
    TESSERA_RETURN_IF_ERROR(updated_.Wait());
    reading.read = shard().room().disk()->ReadUrgent(
        shard().room().extent(), 0, place, shard().bytes(), shard().what());
  }
  landing_ = landing;
  reading_ = reading;
  if (flat_.communicator()->world_size() == 1) {
    return CommFuture();  // AwaitArrival waits for it
  }
  tag.ready = [reading, landing, to = whole().View(owned)]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(reading.Wait());
    return landing.defined() ? CopyHere(landing, to) : absl::OkStatus();
  };
  return flat_.communicator()->AllGather(whole().Bytes(owned), whole().Bytes(),
                                         std::move(tag));
}

// The copy to the device is given to the stream of the collective.
absl::StatusOr<CommFuture> GatheredCopy::LaunchFromHost(CommTag tag) {
  if (flat_.communicator()->world_size() == 1) return CopyFromHost();
  const Range owned = flat_.owned();
  tag.ready = [updated = updated_, shard = &shard(),
               to = whole().View(owned)]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(updated.Wait());
    TorchScope scope;
    return shard->CopyTo({0, shard->numel()}, to);
  };
  return flat_.communicator()->AllGather(whole().Bytes(owned), whole().Bytes(),
                                         std::move(tag));
}

// Alone: nothing to gather, and no other stream that would do it meanwhile.
absl::StatusOr<CommFuture> GatheredCopy::CopyFromHost() {
  TESSERA_RETURN_IF_ERROR(updated_.Wait());
  const StreamPoint allocated = StreamPoint::Now(flat_.device());
  CommThread::End end;
  const c10::StreamGuard guard(SideStream(flat_.device()));
  allocated.Order();
  TESSERA_RETURN_IF_ERROR(
      shard().CopyTo({0, shard().numel()}, whole().View(flat_.owned())));
  end.result = StreamPoint::Now(flat_.device());
  return DoneFuture(std::move(end));
}

// Nothing reads to memory that may be freed from here on, whatever became of
// the collective.
absl::Status GatheredCopy::AwaitArrival() {
  absl::Status read = std::exchange(reading_, Reading()).Wait();
  const at::Tensor landing = std::exchange(landing_, at::Tensor());
  if (read.ok() && landing.defined() &&
      flat_.communicator()->world_size() == 1) {
    read = CopyHere(landing, whole().View(flat_.owned()));
  }
  if (read.ok()) return ShardedCopy::AwaitArrival();
  (void)ShardedCopy::AwaitArrival();
  if (whole().defined()) ShardedCopy::Free();
  return read;
}

absl::Status GatheredCopy::AllocateSecondary() {
  if (!traits_.keeps_secondary || secondary_.defined() || !InForward()) {
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(
      secondary_, Allocate(flat_.layout().whole_numel() /
                               flat_.options().reshard_group->world_size(),
                           MemoryKind::kParameters, Fill::kNone));
  return absl::OkStatus();
}

// After a forward: keeps what the backward will gather from.
void GatheredCopy::Free() {
  if (secondary_.defined() && InForward()) {
    const Communicator& group = *flat_.options().reshard_group;
    const int64_t part = flat_.layout().whole_numel() / group.world_size();
    TorchScope scope;
    secondary_.View().copy_(
        whole().View({group.rank() * part, (group.rank() + 1) * part}));
    secondary_holds_ = true;
  }
  ShardedCopy::Free();
}

void GatheredCopy::DropSecondary() {
  secondary_.Reset();
  secondary_holds_ = false;
}

void GatheredCopy::Drop() {
  secondary_.Reset();
  ShardedCopy::Drop();
}

// Its own shard is read at once.
absl::StatusOr<CommFuture> ServedCopy::Launch() {
  TESSERA_RETURN_IF_ERROR(updated_.Wait());
  return flat_.options().served->Pull(
      flat_.options().served_key, whole().Bytes(),
      CommTag{absl::StrCat("gather of unit ", flat_.name())});
}

void ServedCopy::Offer() {
  flat_.options().served->Offer(flat_.options().served_key,
                                shard().memory().Bytes());
}

// Others may be reading the shard, and go on until they have stopped, too.
void ServedCopy::Drop() {
  flat_.options().served->Keep(shard().TakeMemory());
  ShardedCopy::Drop();
}

}  // namespace tessera
