#include "comm/rendezvous/abandonable.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "base/sigpipe.h"
#include "base/status.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"

namespace tessera {
namespace {

constexpr absl::Duration kAskEvery = absl::Milliseconds(20);

}  // namespace

absl::Status RunAbandonable(std::function<absl::Status()> work,
                            const std::function<absl::Status()>& stop) {
  struct Shared {
    MonotonicMutex mutex;
    bool done = false;
    absl::Status status;
  };
  auto shared = std::make_shared<Shared>();
  auto run = [shared, work = std::move(work)]() mutable {
    const SigpipeBlock no_sigpipe;  // for the threads that `work` starts
    absl::Status status = work();
    work = nullptr;
    MonotonicMutexLock lock(&shared->mutex);
    shared->status = std::move(status);
    shared->done = true;
  };
  TESSERA_ASSIGN_OR_RETURN(std::thread thread,
                           StartThread("tessera-start", std::move(run)));
  thread.detach();
  while (true) {
    {
      MonotonicMutexLock lock(&shared->mutex);
      if (shared->mutex.AwaitFor(absl::Condition(&shared->done), kAskEvery)) {
        return shared->status;
      }
    }
    TESSERA_RETURN_IF_ERROR(stop());
  }
}

}  // namespace tessera
