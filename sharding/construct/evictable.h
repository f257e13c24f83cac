// Evictable: memory of one CPU storage that can be taken away, and come back at
// the same address. While it is away, an access through the storage throws, and
// one through a raw pointer from before ends the program with a message: it is
// never read or written by mistake.
//
//   c10::DataPtr  -- address, deleter -->  Evictable  -- pages of its own
//
// The storage owns it as it owns any memory; what is taken away, and when, is
// decided by its EvictableOwner (sharding/construct/construction.h).
//
// Threads: one at a time.
#ifndef SHARDING_CONSTRUCT_EVICTABLE_H_
#define SHARDING_CONSTRUCT_EVICTABLE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/memory/write_faults.h"
#include "base/torch/tensor_memory.h"
#include "c10/core/StorageImpl.h"

namespace tessera {

class Evictable;

// Who may take memory away.
class EvictableOwner {
 public:
  virtual ~EvictableOwner() = default;
  // The storage of `memory` was destroyed or takes other memory.
  virtual void Forget(Evictable* memory) = 0;
};

class Evictable final : public TensorMemory {
 public:
  // Of `bytes` > 0, zeros, with room for `room` bytes at least; in the ledger
  // as working memory. Tells the owner when the storage is destroyed or takes
  // other memory. ResourceExhausted.
  static absl::StatusOr<c10::DataPtr> Allocate(
      int64_t bytes, int64_t room, std::shared_ptr<EvictableOwner> owner);
  // Null: the memory is another's.
  static Evictable* Of(const c10::DataPtr& memory);
  static Evictable* Of(c10::StorageImpl* storage);

  ~Evictable() override;
  Evictable(const Evictable&) = delete;
  Evictable& operator=(const Evictable&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool whole() const { return whole_; }
  // Null once it is plain memory.
  const std::shared_ptr<EvictableOwner>& owner() const { return owner_; }

  // Gives the pages back to the system, and `error` to who asks `storage` for
  // them. REQUIRES: whole; `storage` is the one that holds this.
  // ResourceExhausted where the system allows no more mappings: it is away all
  // the same, but a raw pointer from before reads zeros.
  absl::Status Take(c10::StorageImpl* storage, const std::string& error);
  // Zeros. ResourceExhausted: it is still away. REQUIRES: not whole.
  absl::Status Return();
  // To be called after Return when the values are there.
  void Show(c10::StorageImpl* storage);
  // The error for who asks for it from now on. REQUIRES: not whole.
  void SetError(c10::StorageImpl* storage, const std::string& error);
  // Is plain memory from now on, of no owner and in no ledger. REQUIRES: whole.
  void Retire();

 private:
  Evictable(char* data, int64_t bytes, int64_t room,
            std::shared_ptr<EvictableOwner> owner);

  char* const data_;
  const int64_t bytes_;
  const int64_t room_;
  std::shared_ptr<EvictableOwner> owner_;
  bool whole_ = true;
  std::unique_ptr<WriteFaults> faults_;  // while it is away
};

}  // namespace tessera
#endif  // SHARDING_CONSTRUCT_EVICTABLE_H_
