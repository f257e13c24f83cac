// Runtime holds the devices' streams, events, memory and counters, below torch.
// A process has one. Threads: any.
#ifndef TESTING_DEVICE_RUNTIME_H_
#define TESTING_DEVICE_RUNTIME_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "c10/core/Stream.h"
#include "testing/device/arena.h"
#include "testing/device/order_checker.h"
#include "testing/device/test_device.h"
#include "testing/device/worker.h"

namespace testdevice {

class Runtime {
 public:
  // REQUIRES: Make was called.
  static Runtime& Get();
  static void Make(int devices);

  int devices() const { return devices_; }
  Arena& arena() { return arena_; }
  OrderChecker& checker() { return checker_; }

  // ---- Streams. Each device has a default one and a pool.

  // Half of the pool is for streams of high priority.
  static constexpr int kPool = 32;
  // The current device is this thread's.
  int current_device() const;
  void set_current_device(int device);
  c10::Stream Current(int device) const;
  c10::Stream Exchange(c10::Stream stream);
  c10::Stream Default(int device) const;
  c10::Stream FromPool(int device, bool high_priority);
  // Returns the stream's number in the checker.
  int NumberOf(c10::Stream stream) const;

  // ---- Tasks.

  void SetMode(Mode mode, uint64_t seed);
  bool has_workers() const { return has_workers_; }
  void Launch(c10::Stream stream, const std::string& what,
              const std::vector<Access>& accesses,
              const OrderChecker::Describe& describe,
              std::function<void()> work);
  // Blocks until the stream has done all, and counts that wait.
  void HostWait(c10::Stream stream, const std::string& what);
  void HostWaitForDevice(int device, const std::string& what);
  // Waits until all streams have done all. The host learns nothing by it, and
  // it is not counted, since no rule of devices makes the host wait.
  void Drain();
  // Returns notifications for when all streams have done what they have been
  // given by now; empty if they do it at once.
  std::vector<Worker::Done> MarkAll();
  bool IsIdle(c10::Stream stream);

  // ---- Events.

  struct Event {
    Clock clock;
    Worker::Done done;  // null: done at once
  };
  std::shared_ptr<Event> Record(c10::Stream stream);
  void Block(const Event& event, c10::Stream stream);
  bool Query(const Event& event);
  void HostWait(const Event& event, const std::string& what);

  // ---- Memory.

  // Allocates on this thread's current device and stream.
  void* Allocate(int64_t bytes, const std::string& maker);
  void Free(void* address);
  void RecordStream(const void* address, c10::Stream stream);

  // ---- Counters.

  std::vector<HostWaited> host_waits() const;
  void ResetHostWaits();
  std::map<std::string, int64_t> launch_counts() const;
  int64_t CountLaunches(const std::string& what, c10::Stream stream) const;

 private:
  explicit Runtime(int devices);
  std::shared_ptr<Worker> WorkerOf(c10::Stream stream);
  void Count(const std::string& what);
  void CountLaunch(const std::string& what, c10::Stream stream);
  void Poison(c10::Stream stream, uintptr_t begin, int64_t bytes);
  c10::Stream StreamNumbered(int number) const;
  // Returns freed blocks to the arena once their streams are done with them.
  void SweepFreed();

  const int devices_;
  Arena arena_;
  OrderChecker checker_;
  std::atomic<int> next_of_pool_{0}, next_of_high_{0};
  std::atomic<bool> has_workers_{false};

  struct Leaving {
    uintptr_t begin = 0;
    std::vector<Worker::Done> until;
  };
  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<Worker>> workers_ ABSL_GUARDED_BY(mutex_);
  uint64_t seed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uintptr_t, std::vector<int>> recorded_ ABSL_GUARDED_BY(mutex_);
  std::vector<Leaving> leaving_ ABSL_GUARDED_BY(mutex_);
  // The keys are what was waited for, and the thread.
  std::map<std::pair<std::string, std::string>, int64_t> host_waits_
      ABSL_GUARDED_BY(mutex_);
  // The keys are what was launched, and the stream's number.
  std::map<std::pair<std::string, int>, int64_t> launches_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_RUNTIME_H_
