// Why a thread of its own for each: a rank whose engine is gone still owes its
// shards to those that are slower, and its caller is not to wait for them
// longer than `patience`. Detached, since nobody is left to join it;
// WaitForRetiredServers is for those that want to end the process in order.
#include "comm/serve/retired_servers.h"

#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/log.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"

namespace tessera {
namespace {

// Never destroyed: detached threads use it.
MonotonicMutex& g_mutex = *new MonotonicMutex;
int g_count ABSL_GUARDED_BY(g_mutex) = 0;

struct Retired {
  std::unique_ptr<ShardServer> server;
  std::function<void()> ended;
  MonotonicNotification through;

  void Run() {
    (void)server->Retire().Wait();
    server = nullptr;
    ended();
    ended = nullptr;
    through.Notify();
    MonotonicMutexLock lock(&g_mutex);
    --g_count;
  }
};

}  // namespace

void RetireServer(std::unique_ptr<ShardServer> server,
                  std::function<void()> ended, absl::Duration patience) {
  {
    MonotonicMutexLock lock(&g_mutex);
    ++g_count;
  }
  const auto retired = std::make_shared<Retired>();
  retired->server = std::move(server);
  retired->ended = std::move(ended);
  auto thread = StartThread("tessera-retired", [retired] { retired->Run(); });
  if (thread.ok()) {
    thread->detach();
    retired->through.WaitFor(patience);
  } else {
    TESSERA_LOG(WARNING) << thread.status().message()
                         << "; waiting for those that read this rank's shards";
    retired->Run();
  }
}

bool WaitForRetiredServers(absl::Duration timeout) {
  MonotonicMutexLock lock(&g_mutex);
  const auto none = +[](int* count) { return *count == 0; };
  return g_mutex.AwaitFor(absl::Condition(none, &g_count), timeout);
}

}  // namespace tessera
