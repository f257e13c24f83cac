// BoundedStore: a c10d store whose every answer is waited for a bounded time.
//
// A store's client blocks for minutes when the process that hosts the store is
// stopped. Here a thread of its own ("tessera-store") talks to the store; who
// asks waits `patience` at most and then reads silence. While an answer is
// overdue, reads are silent at once, and writes are queued.
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

  // True once the store holds the value; false if the store is gone, or silent.
  bool Set(const std::string& key, const std::string& value);
  // The values, as the store held them at one time, or one after the other if
  // it cannot do that; nullopt if it is gone or silent. REQUIRES: all have been
  // set before by somebody.
  std::optional<std::vector<std::string>> Get(
      const std::vector<std::string>& keys);

  // An answer is overdue.
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
