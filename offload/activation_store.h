// ActivationStore: memory that a forward leaves for its backward, elsewhere in
// between: that of a device in pinned memory of the host, that of the CPU on a
// disk.
//
//   forward    Put ... Put | Put ... Put | ...      groups: of a module each
//   backward   Get of the last group, while the one before it comes back
//
// Putting goes on behind the forward: so many as kUnderWay are on their way
// out, and the next one waits (on a device its stream does, not the host). The
// first Get of a memory has all of its group come back, and the group before,
// so that backward finds it there. What came back is the caller's alone; asked
// for when nobody has it any more it comes again.
//
// Sources: DeepSpeed's cpu_checkpointing; ZeRO-Infinity (arXiv 2104.07857),
// section 5.1.2.
// Threads: any.
#ifndef OFFLOAD_ACTIVATION_STORE_H_
#define OFFLOAD_ACTIVATION_STORE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "c10/core/Storage.h"
#include "c10/util/intrusive_ptr.h"
#include "offload/disk/swap_file.h"

namespace tessera {

struct ActivationStats {  // since Create
  int64_t bytes_out = 0, bytes_back = 0;
  int64_t gone = 0;  // bytes that have room elsewhere now
};

class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  static constexpr size_t kUnderWay = 2;
  static constexpr int64_t kMostUnused = 32;

  // `disk`: where memory of the CPU goes; null: memory of devices goes to the
  // host. What has fewer bytes stays where it is.
  static std::shared_ptr<ActivationStore> Create(std::shared_ptr<SwapFile> disk,
                                                 int64_t least_bytes);

  // This memory stays, since it is there all the time: a module's buffer.
  // Before the first group.
  void Leave(const c10::Storage& storage) {
    left_.insert_or_assign(storage.unsafeGetStorageImpl(),
                           storage.getWeakStorageImpl());
  }

  // A memory that is elsewhere; its room is free again when nobody has this.
  class Entry;
  using Stored = std::shared_ptr<Entry>;

  // What comes back together; of one thread.
  class Group {
   public:
    // The memory as it is now goes there; the same one for the same memory and
    // version. Null: it stays, since it is small, or not where this store takes
    // from, or what is `used` of it, in bytes, is less than a kMostUnused-th: a
    // batch of a data set is a view of all of that. ResourceExhausted. ASYNC:
    // nobody writes to it before AwaitOut, but may free it.
    absl::StatusOr<Stored> Put(const c10::Storage& storage, int64_t used,
                               int64_t version, const std::string& what);
    const std::shared_ptr<ActivationStore>& store() const { return store_; }

   private:
    friend class ActivationStore;
    Group(std::shared_ptr<ActivationStore> store, int64_t number)
        : store_(std::move(store)), number_(number) {}
    struct Known {
      c10::weak_intrusive_ptr<c10::StorageImpl> storage;
      int64_t version;
      Stored stored;
    };
    std::shared_ptr<ActivationStore> store_;
    int64_t number_;
    std::vector<Known> known_;
  };
  Group NewGroup();

  // The memory that it was may be written to, by what this thread's current
  // stream is given from here on. With a disk blocking.
  void AwaitOut(const Stored& stored);
  // What it was, on its device, for this thread's current stream. With a disk
  // blocking, and its errors; ResourceExhausted.
  absl::StatusOr<c10::Storage> Get(const Stored& stored);
  // A backward has ended: what came back and was not asked for goes.
  void DropFetched();

  ActivationStats stats() const;

 private:
  ActivationStore(std::shared_ptr<SwapFile> disk, int64_t least_bytes)
      : disk_(std::move(disk)), least_bytes_(least_bytes) {}
  bool Takes(const c10::Storage& storage) const;
  absl::Status StartOut(Entry* entry, const c10::Storage& storage)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndOut(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LimitOut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StartBack(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartGroupBack(int64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<SwapFile> disk_;
  const int64_t least_bytes_;
  // Weak, so that none of another gets an address of these.
  absl::flat_hash_map<const c10::StorageImpl*,
                      c10::weak_intrusive_ptr<c10::StorageImpl>>
      left_;
  std::atomic<int64_t> gone_{0};
  mutable absl::Mutex mutex_;
  using Entries = std::vector<std::weak_ptr<Entry>>;
  int64_t groups_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, Entries> by_group_ ABSL_GUARDED_BY(mutex_);
  // On their way out, the oldest first.
  std::deque<std::weak_ptr<Entry>> leaving_ ABSL_GUARDED_BY(mutex_);
  ActivationStats stats_ ABSL_GUARDED_BY(mutex_);  // but `gone`
};

}  // namespace tessera
#endif  // OFFLOAD_ACTIVATION_STORE_H_
