// Construction: the tensors of a module that is being built; only a limited
// part of them is whole at a time.
//
//   Scope   operators of its thread reach the fallback
//           (sharding/dispatch/tag.h); the memory of new CPU tensors can be
//           taken away (sharding/construct/evictable.h)
//   Trim    after each operator, what was used longest ago goes to the shards
//           of all ranks, until half of the budget is left for the next one
//   pins    before an operator, what it is given comes back from the shards,
//           except what it overwrites
//   Finish  parameters are sharded, until an engine takes them over; the others
//           are plain tensors
//
// Constructors run as they are, so bits and random numbers are those of plain
// construction. All ranks run the same operators, on which alone evictions
// depend, so they evict and gather the same tensors in the same order.
//
// Rank r of W keeps bytes [r * n, (r+1) * n) of each tensor, where n is a W-th
// of its bytes, rounded up to 64.
//
// Threads: any; tensors made by threads outside of a Scope are plain. The order
// of collectives is the order of the thread's operators.
#ifndef SHARDING_CONSTRUCT_CONSTRUCTION_H_
#define SHARDING_CONSTRUCT_CONSTRUCTION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/memory/memory.h"
#include "base/torch/tensor_memory.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "comm/communicator.h"
#include "sharding/construct/evictable.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Tensors below this size, and temporaries of operators below it, are plain
// memory.
inline constexpr int64_t kEvictableFromBytes = 512;

class Construction final : public TensorMemorySource,
                           public EvictableOwner,
                           public std::enable_shared_from_this<Construction> {
 public:
  struct Counts {
    int64_t evictions = 0;
    int64_t gathers = 0;
    int64_t overwrites = 0;  // overwritten tensors that needed no gather
  };

  Construction(std::shared_ptr<Communicator> comm, int64_t budget_bytes)
      : comm_(std::move(comm)), budget_(budget_bytes) {}

  // While it lives, this thread's tensors belong to `construction`. Scopes do
  // not nest.
  class Scope {
   public:
    explicit Scope(Construction* construction);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    c10::impl::IncludeDispatchKeyGuard seen_;
    TensorMemoryScope memory_;
  };
  // Returns the construction of this thread's Scope, or null.
  static Construction* Current();

  // Checks that all ranks have made the same tensors: InvalidArgument says
  // which differs. Then everything except parameters becomes plain, and the
  // parameters are evicted; an access to their memory is an error that names
  // them. COLLECTIVE.
  absl::Status Finish(const torch::nn::Module& module);
  Counts counts() const;

  // ---- For the fallback.

  // Makes a result of an operator in the scope evictable. LOCAL.
  void Note(const at::Tensor& result);
  // Evicts down to half of the budget, except what the last operator used.
  // LOCAL. ResourceExhausted.
  absl::Status Trim();

 private:
  friend class EvictablePins;
  friend std::optional<uint64_t> FingerprintOfEvictable(
      const at::Tensor& tensor);
  friend absl::Status GiveBackEvictable(const at::Tensor& tensor);
  friend absl::Status CheckGroupOfEvictable(const at::Tensor& tensor,
                                            const Communicator& comm);

  struct Node {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t number;    // in order of appearance
    int64_t used;      // when
    std::string what;  // dtype and sizes, then the parameter's name
    bool is_parameter = false;
    int pins = 0;
    // It is being overwritten: until that is done it keeps its shard, too.
    bool overwritten = false;
    CountedBuffer shard{};  // while evicted
    uint64_t print = 0;     // of the bytes, while evicted
  };
  using Storage = c10::intrusive_ptr<c10::StorageImpl>;

  int64_t SliceBytes(int64_t bytes) const;
  c10::DataPtr Allocate(int64_t bytes, c10::Allocator& base) override;
  void Forget(Evictable* memory) override;
  // Returns the construction that `memory` belongs to. REQUIRES: it is not
  // plain.
  static std::shared_ptr<Construction> OwnerOf(const Evictable& memory);
  absl::Status Pin(const Storage& storage, bool overwritten);
  // Makes it whole and plain. COLLECTIVE where it was evicted.
  absl::Status GiveBack(const Storage& storage);
  void Unpin(const Storage& storage, bool done);
  absl::Status Evict(Evictable* memory, const Storage& storage)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Restore(Evictable* memory, const Storage& storage,
                       bool overwritten) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Use(Evictable* memory, Node* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ShardParameters(const torch::nn::Module& module);
  absl::Status CheckSameOnAllRanks();
  std::vector<Storage> All();

  const std::shared_ptr<Communicator> comm_;
  const int64_t budget_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<Evictable*, Node> nodes_ ABSL_GUARDED_BY(mutex_);
  // Whole tensors' memory, by time of last use and number.
  std::map<std::pair<int64_t, int64_t>, Evictable*> by_use_
      ABSL_GUARDED_BY(mutex_);
  int64_t whole_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t now_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  Counts counts_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  // Fingerprint and description of everything that was evicted so far.
  std::vector<std::pair<uint64_t, std::string>> history_
      ABSL_GUARDED_BY(mutex_);
};

// EvictablePins: keeps tensors of constructions whole. Other tensors cost a
// comparison.
class EvictablePins {
 public:
  EvictablePins() = default;
  EvictablePins(const EvictablePins&) = delete;
  EvictablePins& operator=(const EvictablePins&) = delete;
  ~EvictablePins() { Clear(/*done=*/false); }
  // Pins a tensor. COLLECTIVE where it was evicted, unless all of it is
  // `overwritten` next. Throws StatusException.
  void Add(const at::Tensor& tensor, bool overwritten = false);
  // Unpins all; unless `done`, tensors that were to be overwritten get their
  // old values back.
  void Clear(bool done);
  // Unpins all when the operator is done, and evicts what is beyond the budget.
  // Throws StatusException.
  void ClearAndTrim();
  bool empty() const { return pinned_.empty(); }

 private:
  std::vector<std::pair<std::shared_ptr<Construction>, Construction::Storage>>
      pinned_;
};

// Whether a construction may take the tensor's memory away.
bool IsEvictable(const at::Tensor& tensor);
// Makes a tensor plain and whole. COLLECTIVE where it was evicted; does nothing
// if it is not IsEvictable.
absl::Status GiveBackEvictable(const at::Tensor& tensor);
// Returns InvalidArgument if the tensor's construction was over other ranks
// than `comm`'s, or in another order. LOCAL.
absl::Status CheckGroupOfEvictable(const at::Tensor& tensor,
                                   const Communicator& comm);
// Returns a fingerprint of all bytes of the tensor's storage as of their
// eviction, without a gather; nullopt if it is not IsEvictable. LOCAL.
std::optional<uint64_t> FingerprintOfEvictable(const at::Tensor& tensor);

}  // namespace tessera
#endif  // SHARDING_CONSTRUCT_CONSTRUCTION_H_
