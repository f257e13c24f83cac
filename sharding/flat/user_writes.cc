#include "sharding/flat/user_writes.h"

#include <utility>

#include "base/bits.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"

namespace tessera {

void UserWrites::NotePlaced(const FlatDescription& flat,
                            const FlatBuffer& whole, int slot,
                            const std::string& op) {
  absl::MutexLock lock(&mutex_);
  placed_.Note(flat, whole, slot, op);
  has_placed_ = true;
}

std::string UserWrites::TakePlaced(const FlatDescription& flat,
                                   const FlatBuffer* whole) {
  absl::MutexLock lock(&mutex_);
  has_placed_ = false;
  if (whole != nullptr) placed_.Close(flat, *whole);
  return placed_.Take(flat);
}

void UserWrites::ClearPlaced() {
  absl::MutexLock lock(&mutex_);
  placed_.Clear();
}

absl::Status UserWrites::KeepBefore(const FlatDescription& flat,
                                    const ShardStates& states,
                                    const FlatBuffer& whole) {
  if (!states.splits() || dirty()) return absl::OkStatus();
  const TieredBuffer& shard = states.At(ShardStates::kWorking);
  if (!shard.in_memory() || !whole.defined()) return absl::OkStatus();
  const at::Tensor written = whole.View(flat.owned());
  if (written.const_data_ptr() != shard.View().const_data_ptr()) {
    return absl::OkStatus();
  }
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  TESSERA_ASSIGN_OR_RETURN(
      before_,
      FlatBuffer::Allocate(written.numel(), flat.dtype(), flat.device(),
                           MemoryKind::kWorking, Fill::kNone));
  before_.View().copy_(written);
  return absl::OkStatus();
}

void UserWrites::DropBefore() {
  absl::MutexLock lock(&mutex_);
  before_.Reset();
}

void UserWrites::TakeOver(const FlatDescription& flat, const FlatBuffer& whole,
                          ShardStates* states) {
  absl::MutexLock lock(&mutex_);
  taken_over_ = true;
  placed_.Close(flat, whole);
  error_.Update(states->TakeWorking(whole.View(flat.owned()), before_.View()));
  before_.Reset();
  states->SetChanged();
  if (!flat.options().check_writes) return;
  const at::Tensor bytes = whole.Bytes().cpu();
  fingerprint_ =
      fingerprint_ * 31 +
      Fingerprint(bytes.const_data_ptr(), static_cast<int64_t>(bytes.nbytes()));
}

absl::Status UserWrites::TakeError() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(error_, absl::OkStatus());
}

uint64_t UserWrites::TakeFingerprint() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(fingerprint_, 0);
}

}  // namespace tessera
