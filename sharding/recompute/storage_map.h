// StorageMap: maps storages, by address, to values. Storages are held weakly:
// their memory may be freed, but their addresses are not reused for other
// storages.
#ifndef SHARDING_RECOMPUTE_STORAGE_MAP_H_
#define SHARDING_RECOMPUTE_STORAGE_MAP_H_

#include <cstddef>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "c10/core/Storage.h"

namespace tessera {

// Returns a tensor's storage; null where there is none.
inline c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? tensor.storage().unsafeGetStorageImpl()
             : nullptr;
}

template <typename T>
class StorageMap {
 public:
  bool Contains(const c10::StorageImpl* storage) const {
    return entries_.contains(storage);
  }
  // Returns a storage's value; null: there is none. Valid until the next
  // change.
  T* Find(const c10::StorageImpl* storage) {
    const auto it = entries_.find(storage);
    return it == entries_.end() ? nullptr : &it->second.known;
  }
  const T* Find(const c10::StorageImpl* storage) const {
    return const_cast<StorageMap*>(this)->Find(storage);
  }
  // Adds a value unless there is one already. Returns the value that is there
  // then.
  T* Add(const c10::Storage& storage, T known) {
    return &entries_
                .try_emplace(storage.unsafeGetStorageImpl(),
                             storage.getWeakStorageImpl(), std::move(known))
                .first->second.known;
  }
  void Erase(const c10::StorageImpl* storage) { entries_.erase(storage); }
  // Erases the entries for which f(value) is true.
  template <typename F>
  void EraseIf(F&& f) {
    absl::erase_if(entries_,
                   [&](const auto& entry) { return f(entry.second.known); });
  }
  void Clear() { entries_.clear(); }
  size_t size() const { return entries_.size(); }
  // Calls f(storage, known) for each, in no order.
  template <typename F>
  void ForEach(F&& f) const {
    for (const auto& [storage, entry] : entries_) f(storage, entry.known);
  }

 private:
  struct Entry {
    Entry(c10::weak_intrusive_ptr<c10::StorageImpl> weak, T of_it)
        : storage(std::move(weak)), known(std::move(of_it)) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    T known;
  };
  absl::flat_hash_map<const c10::StorageImpl*, Entry> entries_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_STORAGE_MAP_H_
