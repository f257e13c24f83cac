#include "comm/rendezvous/abandonable.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
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

// Threads that were left to themselves and have not ended.
std::atomic<int> g_left{0};

// Called by exit, before statics are destroyed that are older than the first
// thread that was left: such a thread works with them (gloo reads names of
// folders from its own), and the process would crash after its last word.
void EndWithThreads(int status, void* /*arg*/) {
  if (g_left == 0) return;
  std::fflush(nullptr);
  _exit(status);
}

void Leave() {
  static const int registered = on_exit(EndWithThreads, nullptr);
  (void)registered;
  ++g_left;
}

}  // namespace

absl::Status RunAbandonable(std::function<absl::Status()> work,
                            const std::function<absl::Status()>& stop) {
  struct Shared {
    MonotonicMutex mutex;
    bool done = false, left = false;
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
    if (shared->left) --g_left;
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
    const absl::Status stopped = stop();
    if (stopped.ok()) continue;
    MonotonicMutexLock lock(&shared->mutex);
    if (shared->done) return stopped;
    shared->left = true;
    Leave();
    return stopped;
  }
}

}  // namespace tessera
