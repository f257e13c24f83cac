// Tells ThreadSanitizer what absl's mutexes and notifications do: Debian's
// library is not instrumented. Linked into every program of --config=tsan, with
// the linker's --wrap for each name below (tools/BUILD).
//
// ThreadSanitizer ignores everything between the marks before and after a call:
// absl evaluates conditions there, those of this and of other threads, under
// the lock.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

using absl::Condition;
using absl::Duration;
using absl::Mutex;
using absl::Notification;

// absl counts the users of a Status inside the library, which ThreadSanitizer
// does not see.
extern "C" const char* __tsan_default_suppressions() { return "race:Unref\n"; }

// Declares the original of `name`, and defines what is called in its place.
#define TESSERA_WRAP(Result, name, ...)         \
  extern "C" Result __real_##name(__VA_ARGS__); \
  extern "C" Result __wrap_##name(__VA_ARGS__)

TESSERA_WRAP(void, _ZN4absl7debian35Mutex4LockEv, Mutex* mutex) {
  __tsan_mutex_pre_lock(mutex, 0);
  __real__ZN4absl7debian35Mutex4LockEv(mutex);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

TESSERA_WRAP(bool, _ZN4absl7debian35Mutex7TryLockEv, Mutex* mutex) {
  __tsan_mutex_pre_lock(mutex, __tsan_mutex_try_lock);
  const bool locked = __real__ZN4absl7debian35Mutex7TryLockEv(mutex);
  __tsan_mutex_post_lock(
      mutex,
      __tsan_mutex_try_lock | (locked ? 0 : __tsan_mutex_try_lock_failed), 0);
  return locked;
}

TESSERA_WRAP(void, _ZN4absl7debian35Mutex6UnlockEv, Mutex* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __real__ZN4absl7debian35Mutex6UnlockEv(mutex);
  __tsan_mutex_post_unlock(mutex, 0);
}

TESSERA_WRAP(void, _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE, Mutex* mutex,
             const Condition& condition) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  __tsan_mutex_pre_lock(mutex, 0);
  __real__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(mutex, condition);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

TESSERA_WRAP(
    bool,
    _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE,
    Mutex* mutex, const Condition& condition, Duration timeout) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  __tsan_mutex_pre_lock(mutex, 0);
  const bool met =
      __real__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(
          mutex, condition, timeout);
  __tsan_mutex_post_lock(mutex, 0, 0);
  return met;
}

TESSERA_WRAP(void, _ZN4absl7debian312Notification6NotifyEv,
             Notification* notification) {
  __tsan_release(notification);
  __real__ZN4absl7debian312Notification6NotifyEv(notification);
}

TESSERA_WRAP(void, _ZNK4absl7debian312Notification19WaitForNotificationEv,
             Notification* notification) {
  __real__ZNK4absl7debian312Notification19WaitForNotificationEv(notification);
  __tsan_acquire(notification);
}

TESSERA_WRAP(
    bool,
    _ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE,
    Notification* notification, Duration timeout) {
  const bool notified =
      __real__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(
          notification, timeout);
  if (notified) __tsan_acquire(notification);
  return notified;
}
