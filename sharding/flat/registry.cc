#include "sharding/flat/registry.h"

#include <utility>

namespace tessera {

Registry& Registry::Global() {
  static Registry* registry = new Registry();  // outlives every tensor
  return *registry;
}

void Registry::Add(const c10::StorageImpl* storage, StorageOwner owner) {
  SharedMutexLock lock(&mutex_);
  owned_[storage] = std::move(owner);
  size_ = owned_.size();
}

void Registry::Remove(const c10::StorageImpl* storage) {
  StorageOwner last;  // destroyed without the lock
  SharedMutexLock lock(&mutex_);
  const auto found = owned_.find(storage);
  if (found == owned_.end()) return;
  last = std::move(found->second);
  owned_.erase(found);
  size_ = owned_.size();
}

StorageOwner Registry::Find(const c10::StorageImpl* storage) const {
  SharedMutexReaderLock lock(&mutex_);
  auto it = owned_.find(storage);
  return it == owned_.end() ? StorageOwner{} : it->second;
}

StorageOwner Registry::Find(const at::Tensor& tensor) const {
  if (!tensor.defined() || empty() || !tensor.has_storage()) return {};
  return Find(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace tessera
