// Registry: finds the flat parameter that a storage belongs to, over all
// engines of the process. It knows flat parameters by name only.
//
// Threads: any; lookups take a shared lock.
#ifndef SHARDING_FLAT_REGISTRY_H_
#define SHARDING_FLAT_REGISTRY_H_

#include <atomic>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/shared_mutex.h"

namespace tessera {

class FlatParameter;  // sharding/flat/flat_parameter.h

struct StorageOwner {
  std::shared_ptr<FlatParameter> flat;  // null: no flat owns the storage
  int slot = 0;
  const std::string* name = nullptr;  // lives as long as `flat`
  explicit operator bool() const { return flat != nullptr; }
  // First parameter over the storage; for messages.
  const std::string& parameter() const { return *name; }
};

class Registry {
 public:
  static Registry& Global();

  void Add(const c10::StorageImpl* storage, StorageOwner owner);
  // Removes an entry, if it was added.
  void Remove(const c10::StorageImpl* storage);
  StorageOwner Find(const c10::StorageImpl* storage) const;
  // Finds the owner of a tensor's storage; the tensor may be undefined or
  // without storage.
  StorageOwner Find(const at::Tensor& tensor) const;
  bool empty() const { return size_.load(std::memory_order_relaxed) == 0; }

 private:
  mutable SharedMutex mutex_;
  absl::flat_hash_map<const c10::StorageImpl*, StorageOwner> owned_
      ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> size_{0};
};

}  // namespace tessera
#endif  // SHARDING_FLAT_REGISTRY_H_
