// Why the end is explicit: the destructor of c10d's NCCL group, where nobody
// has shut the group down or aborted it, waits for the device as long as the
// group's timeout, and that on whatever thread drops the group last: the
// communication thread, or the one that watches all others. So a backend is
// destroyed only once shutdown() has returned; one that was aborted, or did not
// come to its end, is never destroyed.
//
// Why on a thread of its own: shutdown() waits for the other ranks of the host,
// which may be gone or may come much later, and abort() waits for the backend's
// threads.
//
// Why in order of creation: groups are made in one order on all ranks, so ranks
// that wait for each other here wait in the same group.
#include "comm/device/open_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/rendezvous/abandonable.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {
namespace {

using BackendPtr = std::shared_ptr<OpenBackend>;

// Never destroyed: detached threads use them.
absl::Mutex& g_mutex = *new absl::Mutex;
std::vector<BackendPtr>& g_open ABSL_GUARDED_BY(g_mutex) =
    *new std::vector<BackendPtr>;

std::vector<BackendPtr> AllOpen() {
  absl::MutexLock lock(&g_mutex);
  return g_open;
}

// On this thread what is done with the backend's events would make a context on
// the first device otherwise.
void TakeDevice(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

// The longest patience among them, from now on.
Deadline DeadlineOf(const std::vector<BackendPtr>& backends) {
  absl::Duration patience;
  for (const BackendPtr& backend : backends) {
    patience = std::max(patience, backend->options().patience);
  }
  return Deadline::After(patience);
}

}  // namespace

OpenBackend::OpenBackend(Options options,
                         c10::intrusive_ptr<c10d::Backend> backend)
    : options_(std::move(options)), backend_(std::move(backend)) {}

BackendPtr OpenBackend::Add(Options options,
                            c10::intrusive_ptr<c10d::Backend> backend) {
  BackendPtr added(new OpenBackend(std::move(options), std::move(backend)));
  absl::MutexLock lock(&g_mutex);
  g_open.push_back(added);
  return added;
}

void OpenBackend::Listen(std::function<absl::Status()> failure) {
  absl::MutexLock lock(&mutex_);
  failure_ = std::move(failure);
}

bool OpenBackend::has_failed() const {
  absl::MutexLock lock(&mutex_);
  return failure_ != nullptr && !failure_().ok();
}

void OpenBackend::Keep() const {
  (void)c10::intrusive_ptr<c10d::Backend>(backend_).release();
}

void OpenBackend::Abort() {
  // There is an error already; what abort says adds nothing.
  (void)CatchTorch("abort", [&] {
    TakeDevice(options_.device);
    backend_->abort();
  });
  Keep();
  NoteEnd();
}

void OpenBackend::ShutDown() {
  const absl::Status status = CatchTorch("shutdown", [&] {
    TakeDevice(options_.device);
    backend_->shutdown();
    if (!late_) backend_.reset();  // it has nothing to wait for
  });
  if (!status.ok()) {
    TESSERA_LOG(WARNING) << options_.what
                         << " could not be closed: " << status.message();
  }
  if (backend_ != nullptr) Keep();
  NoteEnd();
}

void OpenBackend::NoteEnd() {
  {
    absl::MutexLock lock(&g_mutex);
    g_open.erase(std::remove(g_open.begin(), g_open.end(), shared_from_this()),
                 g_open.end());
  }
  ended_.Notify();
}

absl::Status OpenBackend::Begin(bool abort) {
  const absl::Status left = RunAbandonable(
      [self = shared_from_this(), abort] {
        abort ? self->Abort() : self->ShutDown();
        return absl::OkStatus();
      },
      [] { return absl::CancelledError("left to its thread"); });
  if (!absl::IsResourceExhausted(left)) return absl::OkStatus();
  Keep();
  NoteEnd();
  return left;
}

void OpenBackend::Drop() {
  if (begun_.exchange(true)) return;
  const absl::Status begun = Begin(/*abort=*/has_failed());
  if (begun.ok()) return;
  TESSERA_LOG(WARNING) << options_.what
                       << " could not be closed: " << begun.message();
}

void OpenBackend::Close(const Deadline& deadline) {
  Drop();
  if (ended_.WaitFor(std::max(deadline.Left(), absl::ZeroDuration()))) return;
  late_ = true;
  TESSERA_LOG(WARNING) << options_.what << " has not been closed within "
                       << absl::FormatDuration(options_.patience)
                       << ": a rank of its group has not come to its end, or "
                          "its device has not; it is left as it is";
}

void CloseOpenBackends() {
  const std::vector<BackendPtr> all = AllOpen();
  const Deadline deadline = DeadlineOf(all);
  for (const BackendPtr& backend : all) backend->Close(deadline);
}

absl::Status AbandonFailedBackends() {
  std::vector<BackendPtr> begun;
  absl::Status first;
  for (const BackendPtr& backend : AllOpen()) {
    if (!backend->has_failed() || backend->begun_.exchange(true)) continue;
    begun.push_back(backend);
    first.Update(backend->Begin(/*abort=*/true));
  }
  const Deadline deadline = DeadlineOf(begun);
  for (const BackendPtr& backend : begun) {
    if (!backend->ended_.WaitFor(
            std::max(deadline.Left(), absl::ZeroDuration()))) {
      first.Update(absl::DeadlineExceededError(""));
    }
  }
  return first;
}

}  // namespace tessera
