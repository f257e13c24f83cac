// Registry: which unit a storage belongs to, over all engines of the process.
//
// Threads: any; lookups take a shared lock.
#ifndef SHARDING_REGISTRY_H_
#define SHARDING_REGISTRY_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/shared_mutex.h"
#include "sharding/unit.h"

namespace tessera {

struct Owned {
  std::shared_ptr<Unit> unit;  // null: the storage is nobody's
  int slot = 0;
  explicit operator bool() const { return unit != nullptr; }
  // First parameter over the storage; for messages.
  const std::string& parameter() const {
    return unit->ParameterOfSlot(slot).name;
  }
};

class Registry {
 public:
  static Registry& Global();

  void Add(const std::shared_ptr<Unit>& unit);
  void Remove(const Unit& unit);
  Owned Find(const c10::StorageImpl* storage) const;
  // Of a tensor that may be undefined or without storage.
  Owned Find(const at::Tensor& tensor) const;
  bool empty() const { return size_.load(std::memory_order_relaxed) == 0; }

 private:
  mutable SharedMutex mutex_;
  absl::flat_hash_map<const c10::StorageImpl*, Owned> owned_
      ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> size_{0};
};

}  // namespace tessera
#endif  // SHARDING_REGISTRY_H_
