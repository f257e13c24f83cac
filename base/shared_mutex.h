// SharedMutex is std::shared_mutex with absl's thread annotations; readers of
// one process share it, processes do not. It serves where absl::Mutex will not
// do: for a few loads under a lock that is taken for every operator (some
// systems build absl's with deadlock detection, which costs ten times more),
// and where ThreadSanitizer has to see the lock (a system's absl is built
// without it).
#ifndef BASE_SHARED_MUTEX_H_
#define BASE_SHARED_MUTEX_H_

#include <shared_mutex>

#include "absl/base/thread_annotations.h"

namespace tessera {

class ABSL_LOCKABLE SharedMutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  void ReaderLock() ABSL_SHARED_LOCK_FUNCTION() { mutex_.lock_shared(); }
  void ReaderUnlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE SharedMutexLock {
 public:
  explicit SharedMutexLock(SharedMutex* mutex)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex)
      : mutex_(mutex) {
    mutex_->Lock();
  }
  ~SharedMutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  SharedMutexLock(const SharedMutexLock&) = delete;
  SharedMutexLock& operator=(const SharedMutexLock&) = delete;

 private:
  SharedMutex* const mutex_;
};

class ABSL_SCOPED_LOCKABLE SharedMutexReaderLock {
 public:
  explicit SharedMutexReaderLock(SharedMutex* mutex)
      ABSL_SHARED_LOCK_FUNCTION(mutex)
      : mutex_(mutex) {
    mutex_->ReaderLock();
  }
  ~SharedMutexReaderLock() ABSL_UNLOCK_FUNCTION() { mutex_->ReaderUnlock(); }
  SharedMutexReaderLock(const SharedMutexReaderLock&) = delete;
  SharedMutexReaderLock& operator=(const SharedMutexReaderLock&) = delete;

 private:
  SharedMutex* const mutex_;
};

}  // namespace tessera
#endif  // BASE_SHARED_MUTEX_H_
