// Evictable: memory of one CPU storage that can be taken away, and come back at
// the same address. While it is away, an access through the storage throws, and
// one through a raw pointer from before ends the program with a message: it is
// never read or written by mistake.
//
//   c10::DataPtr  -- address, deleter -->  Evictable  -- pages of its own
//
// The storage owns it as it owns any memory; its EvictableOwner
// (sharding/construct/construction.h) decides what is taken away, and when.
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

// EvictableOwner: decides when memory is taken away.
class EvictableOwner {
 public:
  virtual ~EvictableOwner() = default;
  // The storage of `memory` was destroyed or takes other memory.
  virtual void Forget(Evictable* memory) = 0;
};

class Evictable final : public TensorMemory {
 public:
  // Allocates `bytes` > 0 of zeros, with room for at least `room` bytes; the
  // ledger counts it as working memory. The owner is called when the storage is
  // destroyed or takes other memory. ResourceExhausted.
  static absl::StatusOr<c10::DataPtr> Allocate(
      int64_t bytes, int64_t room, std::shared_ptr<EvictableOwner> owner);
  // Returns the Evictable behind a pointer or storage; null: it is other
  // memory.
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

  // Returns the pages to the system; an access through `storage` throws `error`
  // then. REQUIRES: whole; `storage` is the one that holds this.
  // ResourceExhausted where the system allows no more mappings: the memory is
  // away in any case, but an old raw pointer reads zeros.
  absl::Status Take(c10::StorageImpl* storage, const std::string& error);
  // Brings the memory back, as zeros. ResourceExhausted: it is still away.
  // REQUIRES: not whole.
  absl::Status Return();
  // Makes accesses work again; call it after Return when the values are there.
  void Show(c10::StorageImpl* storage);
  // Sets the error of accesses from now on. REQUIRES: not whole.
  void SetError(c10::StorageImpl* storage, const std::string& error);
  // Makes it plain memory, without owner and in no ledger. REQUIRES: whole.
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
