#include "comm/shm_backend.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/memory.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "comm/shm_backend_impl.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

using c10d::OpType;

namespace {

// How long a backend that is closed waits for others in what it has begun.
constexpr absl::Duration kCloseGrace = absl::Seconds(5);

}  // namespace

ShmBackend::ShmBackend(const GroupOptions& options,
                       std::unique_ptr<CommThread> thread,
                       std::shared_ptr<ShmGroup> group)
    : Backend(options.rank, options.world_size),
      options_(options),
      thread_(std::move(thread)),
      group_(std::move(group)) {
  shm::Channels::Options channels;
  channels.timeout = options.collective_timeout;
  channels.gone = [group = group_.get()](int peer) {
    return group->EndOf(peer);
  };
  channels_ = std::make_unique<shm::Channels>(&group_->memory().team,
                                              std::move(channels));
}

ShmBackend::~ShmBackend() {
  if (!CommThread::IsCurrent() && !shm::Channels::IsCurrent()) {
    shutdown();
    return;
  }
  // On a thread that is to end, by a callback that held the last reference.
  std::thread([thread = std::move(thread_), group = std::move(group_),
               channels = std::move(channels_)]() mutable {
    Close(thread.get(), group.get(), channels.get(),
          absl::CancelledError("the group was closed"));
    channels = nullptr;
    group = nullptr;
  }).detach();
}

void ShmBackend::Close(CommThread* thread, ShmGroup* group,
                       shm::Channels* channels, const absl::Status& why) {
  channels->Abort(why);
  // What others have come to ends well.
  absl::Notification ended;
  thread->Post([&ended] {
    ended.Notify();
    return absl::OkStatus();
  });
  if (!ended.WaitForNotificationWithTimeout(kCloseGrace)) {
    group->memory().team.Abort(why);
    ended.WaitForNotification();
  }
  thread->Stop();
}

void ShmBackend::abort() {
  closed_ = absl::CancelledError("the group was aborted");
  channels_->Abort(closed_);
  group_->memory().team.Abort(closed_);
}

void ShmBackend::shutdown() {
  if (closed_.ok()) closed_ = absl::CancelledError("the group was shut down");
  Close(thread_.get(), group_.get(), channels_.get(), closed_);
}

c10::intrusive_ptr<ShmWork> ShmBackend::NewWork(OpType type, Tensors outputs) {
  auto work = c10::make_intrusive<ShmWork>(getRank(), type, ++sequence_,
                                           std::move(outputs));
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPtr ShmBackend::Submit(OpType type, CollectiveRecord record,
                           Tensors outputs, Operation operation) {
  auto work = NewWork(type, std::move(outputs));
  if (!closed_.ok()) {
    work->End(closed_);
    return work;
  }
  group_->Submit(std::move(record), CommTag(""), std::move(operation),
                 [work](const absl::Status& status) { work->End(status); });
  return work;
}

WorkPtr ShmBackend::Together(size_t count,
                             const std::function<WorkPtr(size_t)>& call) {
  std::vector<c10::intrusive_ptr<ShmWork>> works;
  for (size_t i = 0; i < count; ++i) {
    works.push_back(c10::static_intrusive_pointer_cast<ShmWork>(call(i)));
  }
  return EndOfAll(getRank(), std::move(works));
}

void ShmBackend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr ShmBackend::endCoalescing() {
  coalescing_ = false;
  return EndOfAll(getRank(), std::exchange(coalesced_, {}));
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  int64_t bytes = 0;
  CheckArgument(
      size >= 0 &&
          !__builtin_mul_overflow(
              int64_t{size}, static_cast<int64_t>(options.dtype().itemsize()),
              &bytes),
      "allocateTensor",
      absl::StrCat("expected a size of 0 or more, got ", size));
  // From this size on a buffer lies in memory that all ranks map.
  auto buffer = AllocateCounted(std::max(bytes, kMappedFromBytes),
                                MemoryKind::kCommunication);
  TORCH_CHECK_WITH(OutOfMemoryError, buffer.ok(),
                   std::string(buffer.status().message()));
  auto owner = std::make_shared<CountedBuffer>(*std::move(buffer));
  return at::from_blob(
      owner->data(), {size}, [owner](void*) mutable { owner.reset(); },
      options.device(at::kCPU));
}

// ---- messages

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  CheckTensors("send", "tensors", tensors, 1);
  CheckArgument(
      to >= 0 && to < getSize(), "send",
      absl::StrCat("expected a rank of 0 to ", getSize() - 1, ", got ", to));
  auto work = NewWork(OpType::SEND, tensors);
  const at::Tensor flat = Plain(tensors[0]);
  channels_->Send(
      to, tag, flat.const_data_ptr(), static_cast<int64_t>(flat.nbytes()),
      [work, flat](const absl::Status& status, int) { work->End(status); });
  return work;
}

WorkPtr ShmBackend::Receive(const char* op, OpType type, Tensors& tensors,
                            int from, int tag) {
  CheckTensors(op, "tensors", tensors, 1);
  auto work = NewWork(type, tensors);
  const at::Tensor home = tensors[0];
  const at::Tensor flat =
      IsPlain(home) ? home : at::empty(home.sizes(), home.options());
  channels_->Receive(from, tag, flat.mutable_data_ptr(),
                     static_cast<int64_t>(flat.nbytes()),
                     [work, home, flat](const absl::Status& status, int peer) {
                       const c10::AutoGradMode no_grad(false);
                       if (status.ok() && !flat.is_same(home)) {
                         home.copy_(flat);
                       }
                       work->End(status, peer);
                     });
  return work;
}

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  CheckArgument(
      from >= 0 && from < getSize(), "receive",
      absl::StrCat("expected a rank of 0 to ", getSize() - 1, ", got ", from));
  return Receive("receive", OpType::RECV, tensors, from, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return Receive("receive", OpType::RECVANYSOURCE, tensors,
                 shm::Channels::kAnyPeer, tag);
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeShmBackend(
    c10::intrusive_ptr<c10d::Store> store, const GroupOptions& options) {
  auto thread = std::make_unique<CommThread>();
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<ShmGroup> group,
      ShmGroup::Make(std::move(store), options, thread.get()));
  return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<ShmBackend>(
      options, std::move(thread), std::move(group)));
}

}  // namespace tessera
