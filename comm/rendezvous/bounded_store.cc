// Why a thread: a store's client has no timeout that holds while the store's
// host is stopped, and who asks here (the watching thread, or a wait that has
// just failed) is to tell the user within seconds what is wrong, with or
// without the store. Why reads are refused while an answer is overdue: else
// each would wait for `patience` again. Why writes are queued all the same:
// what a rank announces must not be lost by a store that only was slow.
#include "comm/rendezvous/bounded_store.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/sigpipe.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

struct BoundedStore::Job {
  std::function<void()> work;
  bool done = false;
  bool ok = false;
};

struct BoundedStore::Shared {
  MonotonicMutex mutex;
  std::deque<std::shared_ptr<Job>> queue ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
  int overdue ABSL_GUARDED_BY(mutex) = 0;  // jobs nobody waits for any more

  void Run();
};

void BoundedStore::Shared::Run() {
  const SigpipeBlock no_sigpipe;
  auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return stopping || !queue.empty();
  };
  MonotonicMutexLock lock(&mutex);
  while (true) {
    mutex.Await(absl::Condition(&ready));
    if (queue.empty()) break;
    const std::shared_ptr<Job> job = std::move(queue.front());
    queue.pop_front();
    mutex.Unlock();
    const bool ok = CatchTorch("store", job->work).ok();
    job->work = nullptr;
    mutex.Lock();
    job->ok = ok;
    job->done = true;
    if (queue.empty()) overdue = 0;
  }
  ended = true;
}

BoundedStore::BoundedStore(c10::intrusive_ptr<c10d::Store> store,
                           absl::Duration patience)
    : store_(std::move(store)),
      patience_(patience),
      shared_(std::make_shared<Shared>()) {
  auto thread =
      StartThread("tessera-store", [shared = shared_] { shared->Run(); });
  if (thread.ok()) {
    thread_ = *std::move(thread);
    return;
  }
  MonotonicMutexLock lock(&shared_->mutex);
  shared_->ended = true;
  shared_->overdue = 1;
}

BoundedStore::~BoundedStore() {
  bool ended = false;
  {
    MonotonicMutexLock lock(&shared_->mutex);
    shared_->stopping = true;
    ended =
        shared_->mutex.AwaitFor(absl::Condition(&shared_->ended), patience_);
  }
  if (!thread_.joinable()) return;
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

bool BoundedStore::Do(std::function<void()> work, bool even_if_silent) {
  auto job = std::make_shared<Job>();
  job->work = std::move(work);
  MonotonicMutexLock lock(&shared_->mutex);
  const bool silent = shared_->overdue > 0;
  if (silent && !even_if_silent) return false;
  shared_->queue.push_back(job);
  if (silent) return false;
  if (!shared_->mutex.AwaitFor(absl::Condition(&job->done), patience_)) {
    ++shared_->overdue;
    return false;
  }
  return job->ok;
}

bool BoundedStore::Set(const std::string& key, const std::string& value) {
  return Do(
      [store = store_, key, value] {
        store->set(key, value);
        // set() does not wait for the store; a question behind it does.
        store->check({key});
      },
      /*even_if_silent=*/true);
}

std::optional<std::vector<std::string>> BoundedStore::Get(
    const std::vector<std::string>& keys) {
  auto values = std::make_shared<std::vector<std::string>>();
  auto work = [store = store_, keys, values] {
    if (store->hasExtendedApi()) {
      for (const std::vector<uint8_t>& value : store->multiGet(keys)) {
        values->emplace_back(value.begin(), value.end());
      }
      return;
    }
    for (const std::string& key : keys) {
      values->push_back(store->get_to_str(key));
    }
  };
  if (!Do(std::move(work), /*even_if_silent=*/false)) return std::nullopt;
  return *std::move(values);
}

bool BoundedStore::silent() const {
  MonotonicMutexLock lock(&shared_->mutex);
  return shared_->overdue > 0;
}

}  // namespace tessera
