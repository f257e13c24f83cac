// ActivationStore: moves memory that a forward saves for its backward away in
// the meantime: a device's to pinned memory of the host, the CPU's to a disk.
//
//   forward    Put ... Put | Put ... Put | ...      groups: of a module each
//   backward   Get of the last group, while the one before it comes back
//
// Puts run behind the forward: up to kUnderWay are on their way out, and the
// next one waits (on a device its stream does, not the host). The first Get of
// a memory brings back its whole group, and the group before, so that backward
// finds it there. Memory that came back belongs to the caller only; if it is
// asked for after it was freed, it is brought back again.
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
  int64_t gone = 0;  // bytes that are moved away now
};

class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  static constexpr size_t kUnderWay = 2;
  static constexpr int64_t kMostUnused = 32;

  // Makes a store. `disk`: where memory of the CPU goes; null: memory of
  // devices goes to the host. Memory of fewer than `least_bytes` stays where it
  // is.
  static std::shared_ptr<ActivationStore> Create(std::shared_ptr<SwapFile> disk,
                                                 int64_t least_bytes);

  // Makes memory stay that exists all the time, such as a module's buffer. Call
  // it before the first group.
  void Leave(const c10::Storage& storage) {
    left_.insert_or_assign(storage.unsafeGetStorageImpl(),
                           storage.getWeakStorageImpl());
  }

  // A memory that was moved away; its room is freed with the last reference to
  // this.
  class Entry;
  using Stored = std::shared_ptr<Entry>;

  // Memory that comes back together. It is used by one thread.
  class Group {
   public:
    // Moves a memory away as it is now; returns the same Stored for the same
    // memory and version. Null: it stays, since it is small, or not of a kind
    // that this store takes, or less than a kMostUnused-th of it is `used` (in
    // bytes), as with a batch that is a view of a whole data set.
    // ResourceExhausted. ASYNC: the memory must not be written to before
    // AwaitOut, but may be freed.
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

  // Waits until the original memory may be written to, by work that this
  // thread's current stream is given from here on. Blocking with a disk.
  void AwaitOut(const Stored& stored);
  // Brings the memory back, on its device, for this thread's current stream.
  // Blocking with a disk, and returns its errors; ResourceExhausted.
  absl::StatusOr<c10::Storage> Get(const Stored& stored);
  // Frees, at the end of a backward, what came back and was not asked for.
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
  // Weak references, so that no other storage gets one of these addresses.
  absl::flat_hash_map<const c10::StorageImpl*,
                      c10::weak_intrusive_ptr<c10::StorageImpl>>
      left_;
  std::atomic<int64_t> gone_{0};
  mutable absl::Mutex mutex_;
  using Entries = std::vector<std::weak_ptr<Entry>>;
  int64_t groups_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, Entries> by_group_ ABSL_GUARDED_BY(mutex_);
  // Entries on their way out, the oldest first.
  std::deque<std::weak_ptr<Entry>> leaving_ ABSL_GUARDED_BY(mutex_);
  ActivationStats stats_ ABSL_GUARDED_BY(mutex_);  // but `gone`
};

}  // namespace tessera
#endif  // OFFLOAD_ACTIVATION_STORE_H_
