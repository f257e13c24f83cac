// BoundedStore: a c10d store whose every answer is waited for a bounded time.
//
// A store's client blocks for minutes when the process that hosts the store is
// stopped. Here a thread of its own ("tessera-store") talks to the store; a
// caller waits `patience` at most, and then the store counts as silent. While
// an answer is overdue, reads return nothing at once, and writes are queued.
//
// Threads: all calls may come from any thread.
#ifndef COMM_RENDEZVOUS_BOUNDED_STORE_H_
#define COMM_RENDEZVOUS_BOUNDED_STORE_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Store;
}

namespace tessera {

class BoundedStore {
 public:
  BoundedStore(c10::intrusive_ptr<c10d::Store> store, absl::Duration patience);
  // Waits for what is queued, `patience` at most.
  ~BoundedStore();
  BoundedStore(const BoundedStore&) = delete;
  BoundedStore& operator=(const BoundedStore&) = delete;

  // Sets a value; returns true once the store holds it, false if the store is
  // gone, or silent.
  bool Set(const std::string& key, const std::string& value);
  // Returns the values, as of one moment if the store can do that; nullopt if
  // it is gone or silent. REQUIRES: all keys have been set before.
  std::optional<std::vector<std::string>> Get(
      const std::vector<std::string>& keys);

  // Whether an answer is overdue.
  bool silent() const;

 private:
  struct Shared;  // with the thread, which may outlive this
  struct Job;
  // False if `work` failed, or has not ended in time.
  bool Do(std::function<void()> work, bool even_if_silent);

  const c10::intrusive_ptr<c10d::Store> store_;
  const absl::Duration patience_;
  const std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_BOUNDED_STORE_H_
