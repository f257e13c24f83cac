// UserWrites: tracks what a program has written into the working copy of one
// flat since the engine last took its writes over.
//
// Threads: any. The caller orders what takes `whole` or `states`, and
// DropBefore (FlatParameter's mutex).
#ifndef SHARDING_FLAT_USER_WRITES_H_
#define SHARDING_FLAT_USER_WRITES_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/layout/flat_buffer.h"
#include "offload/shard_states.h"
#include "sharding/copy/flat_description.h"
#include "sharding/flat/placed_writes.h"

namespace tessera {

class UserWrites {
 public:
  // Counts a write that is about to begin.
  void Prepare() { prepared_.fetch_add(1, std::memory_order_relaxed); }
  // Calls of Prepare so far.
  int64_t prepared() const { return prepared_; }

  // Whether the whole copy was written to and its owners' parts do not have
  // that yet.
  bool dirty() const { return dirty_; }
  void SetDirty(bool dirty) { dirty_.store(dirty, std::memory_order_relaxed); }
  bool TakeDirty() { return dirty_.exchange(false); }

  // Calls of PlacedWrites (sharding/flat/placed_writes.h).
  void NotePlaced(const FlatDescription& flat, const FlatBuffer& whole,
                  int slot, const std::string& op);
  // `whole` has what was written, if it is not null.
  std::string TakePlaced(const FlatDescription& flat, const FlatBuffer* whole);
  bool has_placed() const { return has_placed_; }
  void ClearPlaced();

  // Keeps the working shard as it is before the first write, where that goes
  // into the shard itself (it is a part of `whole`) and masters are split:
  // which of their elements a write changes is known only from that. Else it
  // does nothing. LOCAL. ResourceExhausted.
  absl::Status KeepBefore(const FlatDescription& flat,
                          const ShardStates& states, const FlatBuffer& whole);
  void DropBefore();
  // Takes `whole` over into this rank's part; with
  // FlatParameterOptions::check_writes keeps its fingerprint. An error is
  // TakeError's. REQUIRES: a TorchScope; the work on `whole` and on the states
  // is done, or ordered before the current stream's. LOCAL.
  void TakeOver(const FlatDescription& flat, const FlatBuffer& whole,
                ShardStates* states);
  // Returns the first error of TakeOver since the last call.
  absl::Status TakeError();
  // Whether a write has been taken over since the last call.
  bool TakeTakenOver() { return taken_over_.exchange(false); }
  // Returns a fingerprint of what was taken over since the last call, 0 if
  // nothing; identical on ranks that wrote the same.
  uint64_t TakeFingerprint();

 private:
  std::atomic<int64_t> prepared_{0};
  std::atomic<bool> dirty_{false};
  std::atomic<bool> taken_over_{false};
  std::atomic<bool> has_placed_{false};
  absl::Mutex mutex_;
  PlacedWrites placed_ ABSL_GUARDED_BY(mutex_);
  uint64_t fingerprint_ ABSL_GUARDED_BY(mutex_) = 0;
  // From KeepBefore until the write is taken over.
  FlatBuffer before_ ABSL_GUARDED_BY(mutex_);
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_FLAT_USER_WRITES_H_
