#include "sharding/flat/user_writes.h"

#include <utility>

#include "base/bits.h"

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

void UserWrites::TakeOver(const FlatDescription& flat,
                          const FlatBuffer& whole) {
  absl::MutexLock lock(&mutex_);
  taken_over_ = true;
  placed_.Close(flat, whole);
  if (!flat.options().check_writes) return;
  const at::Tensor bytes = whole.Bytes().cpu();
  fingerprint_ =
      fingerprint_ * 31 +
      Fingerprint(bytes.const_data_ptr(), static_cast<int64_t>(bytes.nbytes()));
}

uint64_t UserWrites::TakeFingerprint() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(fingerprint_, 0);
}

}  // namespace tessera
