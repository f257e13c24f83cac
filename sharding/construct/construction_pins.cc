// What operators hold of constructions, and what Create asks about tensors of
// theirs.
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "sharding/construct/construction.h"

namespace tessera {

void EvictablePins::Add(const at::Tensor& tensor, bool overwritten) {
  if (!IsEvictable(tensor)) return;
  auto storage = Construction::Storage::reclaim_copy(
      tensor.storage().unsafeGetStorageImpl());
  const auto owner = Construction::OwnerOf(*Evictable::Of(storage.get()));
  ThrowIfError(owner->Pin(storage, overwritten));
  pinned_.emplace_back(owner, std::move(storage));
}

void EvictablePins::Clear(bool done) {
  for (const auto& [construction, storage] : pinned_) {
    construction->Unpin(storage, done);
  }
  pinned_.clear();
}

void EvictablePins::ClearAndTrim() {
  const auto pinned = pinned_;
  Clear(/*done=*/true);
  if (Construction::Current() != nullptr) {
    ThrowIfError(Construction::Current()->Trim());
  }
  for (const auto& [construction, storage] : pinned) {
    if (construction.get() == Construction::Current()) continue;
    ThrowIfError(construction->Trim());
  }
}

bool IsEvictable(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  Evictable* const memory =
      Evictable::Of(tensor.storage().unsafeGetStorageImpl());
  return memory != nullptr && memory->owner() != nullptr;
}

absl::Status GiveBackEvictable(const at::Tensor& tensor) {
  if (!IsEvictable(tensor)) return absl::OkStatus();
  auto storage = Construction::Storage::reclaim_copy(
      tensor.storage().unsafeGetStorageImpl());
  const auto owner = Construction::OwnerOf(*Evictable::Of(storage.get()));
  TESSERA_RETURN_IF_ERROR(owner->GiveBack(storage));
  RemoveTag(tensor);
  return absl::OkStatus();
}

absl::Status CheckGroupOfEvictable(const at::Tensor& tensor,
                                   const Communicator& comm) {
  if (!IsEvictable(tensor)) return absl::OkStatus();
  const auto owner = Construction::OwnerOf(
      *Evictable::Of(tensor.storage().unsafeGetStorageImpl()));
  const Communicator& made = *owner->comm_;
  if (made.rank() == comm.rank() && made.world_size() == comm.world_size()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "ConstructSharded made the module over ", made.world_size(),
      " ranks, where this is rank ", made.rank(), "; the engine's group has ",
      comm.world_size(), ", where this is rank ", comm.rank(),
      "; give both the same group"));
}

std::optional<uint64_t> FingerprintOfEvictable(const at::Tensor& tensor) {
  if (!IsEvictable(tensor)) return std::nullopt;
  Evictable* const memory =
      Evictable::Of(tensor.storage().unsafeGetStorageImpl());
  const auto owner = Construction::OwnerOf(*memory);
  absl::MutexLock lock(&owner->mutex_);
  const auto found = owner->nodes_.find(memory);
  if (found == owner->nodes_.end() || memory->whole()) {
    return Fingerprint(memory->data(), memory->bytes());
  }
  return found->second.print;
}

}  // namespace tessera
