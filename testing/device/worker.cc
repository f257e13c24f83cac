#include "testing/device/worker.h"

#include <exception>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace testdevice {
namespace {

// One task in sixteen is delayed, by up to this much: longer than it takes to
// launch some more tasks.
constexpr int kOneIn = 16;
constexpr int kMostMicroseconds = 300;

}  // namespace

Worker::Worker(uint64_t seed, Failed failed)
    : failed_(std::move(failed)),
      random_(static_cast<std::minstd_rand::result_type>(seed + 1)),
      thread_([this] { Run(); }) {}

Worker::~Worker() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  thread_.join();
}

void Worker::Push(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

Worker::Done Worker::Mark() {
  auto done = std::make_shared<absl::Notification>();
  Push([done] { done->Notify(); });
  return done;
}

void Worker::Wait() { Mark()->WaitForNotification(); }

void Worker::Run() {
  for (;;) {
    std::deque<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      const auto wanted = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return !tasks_.empty() || ends_;
      };
      mutex_.Await(absl::Condition(&wanted));
      if (tasks_.empty()) return;
      tasks.swap(tasks_);
    }
    for (; !tasks.empty(); tasks.pop_front()) {
      if (random_() % kOneIn == 0) {
        absl::SleepFor(absl::Microseconds(random_() % kMostMicroseconds));
      }
      try {
        tasks.front()();
      } catch (const std::exception& error) {
        failed_(error.what());
      }
    }
  }
}

}  // namespace testdevice
