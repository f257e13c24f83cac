// MonotonicMutex and MonotonicNotification are absl's classes for waits with a
// timeout. absl's own timed waits end at a moment of the host's clock: if that
// is set back by a day, a wait of a second lasts a day. These follow the
// monotonic clock.
//
//   MonotonicMutexLock lock(&mutex_);
//   if (!mutex_.AwaitFor(absl::Condition(&done_), patience)) return Late();
//
// Threads: all calls may come from any thread.
#ifndef BASE_THREAD_MONOTONIC_WAIT_H_
#define BASE_THREAD_MONOTONIC_WAIT_H_

#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace tessera {

// The waiting threads evaluate their conditions each time that somebody
// unlocks, so this is for a few waiting threads. Conditions must not touch the
// mutex.
class ABSL_LOCKABLE MonotonicMutex {
 public:
  MonotonicMutex() = default;
  MonotonicMutex(const MonotonicMutex&) = delete;
  MonotonicMutex& operator=(const MonotonicMutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    if (waiting_ > 0) changed_.notify_all();
    mutex_.unlock();
  }
  // Unlocks until `condition` is true.
  void Await(const absl::Condition& condition)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(this) {
    AwaitFor(condition, absl::InfiniteDuration());
  }
  // Unlocks until `condition` is true, for at most `timeout`; returns whether
  // it is true.
  bool AwaitFor(const absl::Condition& condition, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(this);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
};

class ABSL_SCOPED_LOCKABLE MonotonicMutexLock {
 public:
  explicit MonotonicMutexLock(MonotonicMutex* mutex)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex)
      : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MonotonicMutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MonotonicMutexLock(const MonotonicMutexLock&) = delete;
  MonotonicMutexLock& operator=(const MonotonicMutexLock&) = delete;

 private:
  MonotonicMutex* const mutex_;
};

// Does what absl::Notification does; may be destroyed as soon as a wait has
// returned.
class MonotonicNotification {
 public:
  void Notify() {
    MonotonicMutexLock lock(&mutex_);
    notified_ = true;
  }
  bool HasBeenNotified() const { return WaitFor(absl::ZeroDuration()); }
  void Wait() const { WaitFor(absl::InfiniteDuration()); }
  // Waits for at most `timeout`; returns whether it has been notified.
  bool WaitFor(absl::Duration timeout) const {
    MonotonicMutexLock lock(&mutex_);
    return mutex_.AwaitFor(absl::Condition(&notified_), timeout);
  }

 private:
  mutable MonotonicMutex mutex_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera
#endif  // BASE_THREAD_MONOTONIC_WAIT_H_
