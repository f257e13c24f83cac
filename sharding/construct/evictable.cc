// Why the pages go back to the system but the addresses stay: pointers into the
// memory may be anywhere (a user's raw pointer, a view's storage). If the
// addresses could be given out again, such a pointer would read or write
// another tensor and nobody would know. Mapped without access they end the
// program with a message, and the values can come back to where views expect
// them.
#include "sharding/construct/evictable.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/memory/memory.h"
#include "base/torch/storage_access.h"

namespace tessera {
namespace {

constexpr int64_t kPageBytes = 4096;

absl::Status Count(int64_t bytes) {
  return MemoryLedger::Host().Claim(MemoryKind::kWorking, bytes,
                                    "a tensor of a module under construction");
}

absl::Status NoMapping(int64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the system has no ", bytes,
      " bytes for a tensor of a module under construction, or no more mappings "
      "(vm.max_map_count; a larger budget of ConstructSharded takes fewer)"));
}

// The memory goes, but at the limit of mappings the addresses stay: without
// them a larger mapping would have to become two.
void Unmap(char* data, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  if (munmap(data, size) == 0) return;
  TESSERA_CHECK_EQ(errno, ENOMEM);
  TESSERA_CHECK_EQ(madvise(data, size, MADV_DONTNEED), 0);
}

}  // namespace

absl::StatusOr<c10::DataPtr> Evictable::Allocate(
    int64_t bytes, int64_t room, std::shared_ptr<EvictableOwner> owner) {
  room = (std::max(bytes, room) + kPageBytes - 1) / kPageBytes * kPageBytes;
  absl::Status counted = Count(bytes);
  if (!counted.ok()) return counted;
  void* const data =
      mmap(nullptr, static_cast<size_t>(room), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    MemoryLedger::Host().Remove(MemoryKind::kWorking, bytes);
    return NoMapping(bytes);
  }
  return DataPtrOf(
      data, std::unique_ptr<TensorMemory>(new Evictable(
                static_cast<char*>(data), bytes, room, std::move(owner))));
}

Evictable::Evictable(char* data, int64_t bytes, int64_t room,
                     std::shared_ptr<EvictableOwner> owner)
    : data_(data), bytes_(bytes), room_(room), owner_(std::move(owner)) {}

Evictable::~Evictable() {
  if (owner_ != nullptr) {
    if (whole_) MemoryLedger::Host().Remove(MemoryKind::kWorking, bytes_);
    owner_->Forget(this);
  }
  faults_ = nullptr;  // before the addresses can be another's
  Unmap(data_, room_);
}

Evictable* Evictable::Of(const c10::DataPtr& memory) {
  return dynamic_cast<Evictable*>(TensorMemoryOf(memory));
}

Evictable* Evictable::Of(c10::StorageImpl* storage) {
  return Of(storage->_mutable_data_ptr_no_checks());
}

absl::Status Evictable::Take(c10::StorageImpl* storage,
                             const std::string& error) {
  const auto size = static_cast<size_t>(room_);
  // In place: new pages, which nobody may touch.
  const bool guarded =
      mmap(data_, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
           0) != MAP_FAILED;
  if (!guarded) TESSERA_CHECK_EQ(madvise(data_, size, MADV_DONTNEED), 0);
  whole_ = false;
  MemoryLedger::Host().Remove(MemoryKind::kWorking, bytes_);
  SetError(storage, error);
  return guarded ? absl::OkStatus() : NoMapping(bytes_);
}

void Evictable::SetError(c10::StorageImpl* storage, const std::string& error) {
  HideStorageSaying(storage, error);
  faults_ = std::make_unique<WriteFaults>(
      std::vector<WriteFaults::Piece>{{data_, data_ + room_, error}});
}

absl::Status Evictable::Return() {
  const absl::Status counted = Count(bytes_);
  if (!counted.ok()) return counted;
  if (mprotect(data_, static_cast<size_t>(room_), PROT_READ | PROT_WRITE) !=
      0) {
    MemoryLedger::Host().Remove(MemoryKind::kWorking, bytes_);
    return NoMapping(bytes_);
  }
  faults_ = nullptr;
  whole_ = true;
  return absl::OkStatus();
}

void Evictable::Show(c10::StorageImpl* storage) { ShowStorage(storage); }

void Evictable::Retire() {
  if (owner_ == nullptr) return;
  MemoryLedger::Host().Remove(MemoryKind::kWorking, bytes_);
  owner_ = nullptr;
}

}  // namespace tessera
