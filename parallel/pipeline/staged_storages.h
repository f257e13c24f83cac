// StagedStorages: which stages of a pipeline have the values of a storage.
//
//   everywhere   inputs, constants, and what is computed of these alone: all
//                ranks have them, and this knows nothing of them
//   parameters   of the stage that trains them, and of those that were sent
//                them since
//   others       of the stage that computed them, and of those they were sent
//   to
//
// All ranks run the same program, so all know the same of each tensor. Where
// this rank has no values a storage has no memory, and any access to its data
// throws.
//
// Threads: one at a time.
#ifndef PARALLEL_PIPELINE_STAGED_STORAGES_H_
#define PARALLEL_PIPELINE_STAGED_STORAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "c10/core/Storage.h"
#include "c10/util/intrusive_ptr.h"

namespace tessera {

// A set of stages.
class StageSet {
 public:
  static StageSet Everywhere() { return StageSet(~uint64_t{0}); }
  static StageSet Of(int stage) { return StageSet(uint64_t{1} << stage); }

  bool everywhere() const { return bits_ == ~uint64_t{0}; }
  bool has(int stage) const { return (bits_ >> stage & 1) != 0; }
  bool empty() const { return bits_ == 0; }
  void KeepThoseOf(StageSet other) { bits_ &= other.bits_; }
  void Add(int stage) { bits_ |= uint64_t{1} << stage; }
  int lowest() const { return __builtin_ctzll(bits_); }
  int highest() const { return 63 - __builtin_clzll(bits_); }
  // The one that is nearest to `stage`, below it if there is one, or `above`.
  int NearestTo(int stage, bool above) const;

 private:
  explicit StageSet(uint64_t bits) : bits_(bits) {}
  uint64_t bits_;
};

inline constexpr int kMaxStages = 63;

class StagedStorages {
 public:
  // What is said of a storage.
  struct Entry {
    StageSet stages = StageSet::Everywhere();
    int home = -1;  // of a parameter: the stage that trains it
    std::string name;
    // Memory that is older than this: it must have its values again.
    bool outside = false;
    // This rank alone has made it, by computing again what a forward computed,
    // and nobody is sent it: an operator of backward that reads it is of a
    // stage that had it in forward.
    bool own = false;
    int made = -1;      // the stage that has computed it
    int64_t order = 0;  // when it was first written: the same on all ranks
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{
        c10::intrusive_ptr<c10::StorageImpl>()};
  };

  // Null: everywhere.
  const Entry* Find(const c10::StorageImpl* storage) const {
    const auto found = entries_.find(storage);
    return found == entries_.end() ? nullptr : &found->second;
  }
  StageSet StagesOf(const c10::StorageImpl* storage) const {
    const Entry* const entry = Find(storage);
    return entry == nullptr ? StageSet::Everywhere() : entry->stages;
  }

  void AddParameter(const c10::Storage& storage, int home, std::string name);
  // Says that `stage` alone has its values now. `outside`: its memory was there
  // before; `order`: Entry::order, if it is new.
  void SetStage(c10::StorageImpl* storage, int stage, bool outside,
                int64_t order);
  void AddStage(const c10::StorageImpl* storage, int stage);
  void SetOwn(const c10::StorageImpl* storage);
  void SetEverywhere(const c10::StorageImpl* storage);

  // Forgets storages that exist no more.
  void Sweep();
  // Returns the storages from outside that are not everywhere, in one order on
  // all ranks.
  struct Written {
    c10::Storage storage;
    int64_t order;
  };
  std::vector<Written> Outside() const;
  // Returns the parameters that were sent to this rank, whose `stage` is not
  // their home, and says that only their homes have them.
  std::vector<c10::Storage> TakeSentParameters(int stage);

 private:
  absl::flat_hash_map<const c10::StorageImpl*, Entry> entries_;
};

// Returns a storage of `bytes` without memory.
c10::Storage AbsentStorage(size_t bytes, at::Device device);
// Takes a storage's memory away, and gives it some, whose values are not set.
void TakeMemory(c10::StorageImpl* storage);
void GiveMemory(c10::StorageImpl* storage);

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_STAGED_STORAGES_H_
