// ManualClock: a clock that stands still until a test moves it.
//
//   ManualClock clock;
//   auto a = Announcements::Create(store, 0, 2, true, clock.AsClock());
//   clock.Advance(absl::Seconds(5));  // takes no time
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_MANUAL_CLOCK_TESTING_H_
#define COMM_WATCH_MANUAL_CLOCK_TESTING_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/monotonic.h"

namespace tessera {

class ManualClock {
 public:
  absl::Duration Now() const { return time_->Now(); }
  void Advance(absl::Duration by) { time_->Advance(by); }
  // May outlive this.
  Clock AsClock() const {
    return [time = time_] { return time->Now(); };
  }

 private:
  class Time {
   public:
    absl::Duration Now() const {
      absl::MutexLock lock(&mutex_);
      return now_;
    }
    void Advance(absl::Duration by) {
      absl::MutexLock lock(&mutex_);
      now_ += by;
    }

   private:
    mutable absl::Mutex mutex_;
    absl::Duration now_ ABSL_GUARDED_BY(mutex_) = absl::Hours(1);
  };
  const std::shared_ptr<Time> time_ = std::make_shared<Time>();
};

}  // namespace tessera
#endif  // COMM_WATCH_MANUAL_CLOCK_TESTING_H_
