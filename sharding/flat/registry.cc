#include "sharding/flat/registry.h"

namespace tessera {

Registry& Registry::Global() {
  static Registry* registry = new Registry();  // outlives every tensor
  return *registry;
}

void Registry::Add(const std::shared_ptr<FlatParameter>& flat) {
  SharedMutexLock lock(&mutex_);
  int slot = 0;
  for (const auto& storage : flat->storages()) {
    owned_[storage.get()] = StorageOwner{flat, slot++};
  }
  size_ = owned_.size();
}

void Registry::Remove(const FlatParameter& flat) {
  SharedMutexLock lock(&mutex_);
  for (const auto& storage : flat.storages()) owned_.erase(storage.get());
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
