// Watchdog: the one thread of a process ("tessera-watch") that looks after
// waits. Each communicator registers a function that looks at its own; it is
// called now and then, and may take about a second (it asks the store), which
// delays the others' by as much. That is no loss: one communication thread
// waits in one collective at a time, and shards may be told of a second late.
//
// The thread starts with the first registration and ends with the last.
//
// Threads: all calls may come from any thread except the watching one.
#ifndef COMM_WATCH_WATCHDOG_H_
#define COMM_WATCH_WATCHDOG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/thread/monotonic_wait.h"

namespace tessera {

class Watchdog {
 public:
  // The process's own. Never destroyed.
  static Watchdog& Get();

  // Calls `look` every `period` from now on. Returns a number above 0 for
  // Remove, or ResourceExhausted if the thread cannot be started.
  absl::StatusOr<int64_t> Add(absl::Duration period,
                              std::function<void()> look);
  // `look` is not running any more when this returns, and will not.
  void Remove(int64_t id);

 private:
  struct Item {
    absl::Duration period, due;  // MonotonicNow()
    std::function<void()> look;
  };
  void Run();
  // The longest that nobody needs a look.
  absl::Duration UntilDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  MonotonicMutex mutex_;
  std::map<int64_t, Item> items_ ABSL_GUARDED_BY(mutex_);
  int64_t ids_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t looking_ ABSL_GUARDED_BY(mutex_) = 0;  // whose look runs, or 0
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_WATCH_WATCHDOG_H_
