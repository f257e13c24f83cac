#include "sharding/registry.h"

namespace tessera {

Registry& Registry::Global() {
  static Registry* registry = new Registry();  // outlives every tensor
  return *registry;
}

void Registry::Add(const std::shared_ptr<Unit>& unit) {
  SharedMutexLock lock(&mutex_);
  int slot = 0;
  for (const auto& storage : unit->storages()) {
    owned_[storage.get()] = Owned{unit, slot++};
  }
  size_ = owned_.size();
}

void Registry::Remove(const Unit& unit) {
  SharedMutexLock lock(&mutex_);
  for (const auto& storage : unit.storages()) owned_.erase(storage.get());
  size_ = owned_.size();
}

Owned Registry::Find(const c10::StorageImpl* storage) const {
  SharedMutexReaderLock lock(&mutex_);
  auto it = owned_.find(storage);
  return it == owned_.end() ? Owned{} : it->second;
}

Owned Registry::Find(const at::Tensor& tensor) const {
  if (!tensor.defined() || empty() || !tensor.has_storage()) return {};
  return Find(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace tessera
