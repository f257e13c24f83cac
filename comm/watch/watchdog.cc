// Why one thread for all that look: each looks ten times a second to see that
// all is well, and as many threads would disturb those that compute. Why Remove
// waits for a look that is under way: what looks is destroyed next.
#include "comm/watch/watchdog.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/monotonic.h"
#include "base/sigpipe.h"
#include "base/status.h"
#include "base/thread/start_thread.h"

namespace tessera {

Watchdog& Watchdog::Get() {
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

absl::StatusOr<int64_t> Watchdog::Add(absl::Duration period,
                                      std::function<void()> look) {
  MonotonicMutexLock lock(&mutex_);
  if (!thread_.joinable()) {
    TESSERA_ASSIGN_OR_RETURN(thread_,
                             StartThread("tessera-watch", [this] { Run(); }));
  }
  const int64_t id = ++ids_;
  items_[id] = {period, MonotonicNow() + period, std::move(look)};
  changed_ = true;
  return id;
}

void Watchdog::Remove(int64_t id) {
  std::thread thread;
  {
    MonotonicMutexLock lock(&mutex_);
    auto idle = [this, id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return looking_ != id;
    };
    mutex_.Await(absl::Condition(&idle));
    items_.erase(id);
    changed_ = true;
    if (items_.empty()) thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

absl::Duration Watchdog::UntilDue() const {
  absl::Duration due = absl::InfiniteDuration();
  for (const auto& [id, item] : items_) due = std::min(due, item.due);
  return due - MonotonicNow();
}

void Watchdog::Run() {
  const SigpipeBlock no_sigpipe;
  MonotonicMutexLock lock(&mutex_);
  const std::thread::id self = std::this_thread::get_id();
  // Remove takes the thread out when it is to end; another may run by then.
  while (thread_.get_id() == self) {
    changed_ = false;
    mutex_.AwaitFor(absl::Condition(&changed_), UntilDue());
    std::vector<int64_t> due;
    const absl::Duration now = MonotonicNow();
    for (const auto& [id, item] : items_) {
      if (item.due <= now) due.push_back(id);
    }
    for (int64_t id : due) {
      const auto item = items_.find(id);
      if (item == items_.end()) continue;
      item->second.due = now + item->second.period;
      const std::function<void()> look = item->second.look;
      looking_ = id;
      mutex_.Unlock();
      look();
      mutex_.Lock();
      looking_ = 0;
    }
  }
}

}  // namespace tessera
