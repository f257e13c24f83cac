// Why a thread of its own for each: a rank whose engine is gone still owes its
// shards to those that are slower, and its caller is not to wait for them
// longer than `patience`. Detached, since nobody is left to join it;
// WaitForRetiredServers is for those that want to end the process in order.
#include "comm/serve/retired_servers.h"

#include <pthread.h>

#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace tessera {
namespace {

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
int g_count ABSL_GUARDED_BY(g_mutex) = 0;

}  // namespace

void RetireServer(std::unique_ptr<ShardServer> server,
                  std::function<void()> ended, absl::Duration patience) {
  {
    absl::MutexLock lock(&g_mutex);
    ++g_count;
  }
  auto through = std::make_shared<absl::Notification>();
  std::thread([server = std::move(server), ended = std::move(ended),
               through]() mutable {
    pthread_setname_np(pthread_self(), "tessera-retired");
    (void)server->Retire().Wait();
    server = nullptr;
    ended();
    ended = nullptr;
    through->Notify();
    absl::MutexLock lock(&g_mutex);
    --g_count;
  }).detach();
  through->WaitForNotificationWithTimeout(patience);
}

bool WaitForRetiredServers(absl::Duration timeout) {
  absl::MutexLock lock(&g_mutex);
  const auto none = +[](int* count) { return *count == 0; };
  return g_mutex.AwaitWithTimeout(absl::Condition(none, &g_count), timeout);
}

}  // namespace tessera
