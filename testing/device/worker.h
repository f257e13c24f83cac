// Worker runs a stream's tasks, one after the other, on a thread of its own,
// some of them after a delay. A seed determines the delays, so that a run can
// be repeated as far as the system's scheduling allows.
#ifndef TESTING_DEVICE_WORKER_H_
#define TESTING_DEVICE_WORKER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace testdevice {

class Worker {
 public:
  using Done = std::shared_ptr<absl::Notification>;

  // `failed` is called with what a task has thrown.
  using Failed = std::function<void(const std::string& what)>;
  Worker(uint64_t seed, Failed failed);
  // Waits for all that was pushed.
  ~Worker();

  // Adds a task. A task that throws does not prevent later ones.
  void Push(std::function<void()> task);
  // Returns a notification for when all that was pushed before is done.
  Done Mark();
  // Blocks until all that was pushed is done.
  void Wait();
  // Returns whether this thread is the worker's own.
  bool IsCurrent() const {
    return std::this_thread::get_id() == thread_.get_id();
  }

 private:
  void Run();

  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  const Failed failed_;
  std::minstd_rand random_;  // the thread's
  std::thread thread_;
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_WORKER_H_
