// Mutex: std::mutex with absl's thread annotations. ThreadSanitizer sees it in
// full; a system's absl::Mutex was compiled without it.
#ifndef COMM_SHM_MUTEX_H_
#define COMM_SHM_MUTEX_H_

#include <mutex>

#include "absl/base/thread_annotations.h"

namespace tessera::shm {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex)
      : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

}  // namespace tessera::shm
#endif  // COMM_SHM_MUTEX_H_
