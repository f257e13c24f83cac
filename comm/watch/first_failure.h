// FirstFailure: the first failure of communicators that fail together.
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_FIRST_FAILURE_H_
#define COMM_WATCH_FIRST_FAILURE_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

class FirstFailure {
 public:
  // OK while there was none.
  absl::Status Get() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  // Does nothing after the first.
  void Set(const absl::Status& failure) {
    absl::MutexLock lock(&mutex_);
    status_.Update(failure);
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_WATCH_FIRST_FAILURE_H_
