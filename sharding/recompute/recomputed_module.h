// RecomputedUnits::Module: one module whose activations are given up, if they
// can be, and its part of the budget. RecomputedUnits::Shared: what the modules
// of an engine share.
//
// Threads: any.
#ifndef SHARDING_RECOMPUTE_RECOMPUTED_MODULE_H_
#define SHARDING_RECOMPUTE_RECOMPUTED_MODULE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/recompute/recomputed_units.h"
#include "sharding/recompute/region.h"

namespace tessera {

// State that the modules of an engine share; it lives as long as their regions.
class RecomputedUnits::Shared : public std::enable_shared_from_this<Shared> {
 public:
  explicit Shared(RecomputeOptions options) : options(std::move(options)) {}

  // Reserves so many bytes of the budget for as long as the result lives. Null:
  // they are too many.
  std::shared_ptr<void> TryKeep(int64_t bytes) {
    {
      absl::MutexLock lock(&mutex);
      if (kept_bytes + bytes > options.budget_bytes) return nullptr;
      kept_bytes += bytes;
    }
    return std::shared_ptr<void>(this,
                                 [shared = shared_from_this(), bytes](void*) {
                                   absl::MutexLock lock(&shared->mutex);
                                   shared->kept_bytes -= bytes;
                                 });
  }

  const RecomputeOptions options;
  std::atomic<int64_t> backwards{0};  // begun
  const std::shared_ptr<ComputedParts> computed =
      std::make_shared<ComputedParts>();
  absl::Mutex mutex;
  int64_t kept_bytes ABSL_GUARDED_BY(mutex) = 0;  // of the budget
  RecomputeReport report ABSL_GUARDED_BY(mutex);
  ActivationStats moved ABSL_GUARDED_BY(mutex);  // when it was last taken
};

class RecomputedUnits::Module {
 public:
  Module(std::string name, std::shared_ptr<Shared> shared)
      : name_(std::move(name)), shared_(std::move(shared)) {}
  const std::string& name() const { return name_; }
  void AddFlat(const FlatParameter* flat) { flats_.insert(flat); }

  std::shared_ptr<Region> NewRegion(OutsideTensors* outside) const {
    const RecomputeOptions& options = shared_->options;
    return std::make_shared<Region>(
        name_,
        Region::Options{options.keeps, options.store, options.recomputes,
                        shared_->computed},
        outside);
  }
  bool is_kept() const { return is_kept_; }
  int64_t backwards() const { return shared_->backwards; }

  // Ends `region`, of this module. May throw. COLLECTIVE where its gathers are
  // (recomputed_units.h).
  void Close(Region* region);
  void KeepAll(Region* region, int64_t bytes,
               const std::shared_ptr<void>& token);

 private:
  // The ranks that must gather its units together; null: none.
  Communicator* Group() const;
  // See Note [Ranks give up the same] in the .cc.
  void AgreeAtFirst(int64_t bytes, std::string* unable);
  // Whether the region's tape makes what the forward made; what it does not
  // make is held, and no longer among the `bytes` that are given up.
  bool Check(Region* region, int64_t* bytes);
  // Returns what has other bits on any rank, of a tape of so many operators.
  absl::StatusOr<std::vector<int>> Agree(absl::StatusOr<std::vector<int>> other,
                                         int num_operators, bool all_do);
  // The memories of such a tape that are held.
  std::vector<int> HeldOf(uint64_t signature) const;
  void Tell(absl::string_view held);
  // Whether its parameters may have to be gathered, together with the other
  // ranks.
  bool MayGather() const;
  void GiveUp(Region* region, int64_t bytes);
  void Move(Region* region);
  void Keep(absl::string_view why);

  const std::string name_;
  const std::shared_ptr<Shared> shared_;
  absl::flat_hash_set<const FlatParameter*> flats_;  // while the engine lives
  std::atomic<bool> is_kept_{false};
  std::atomic<bool> closed_{false};  // once
  // The most bytes that any rank had at first, where the ranks agree on it.
  std::atomic<int64_t> agreed_bytes_{0};
  // What is held of each tape that was compared; by shared_->mutex.
  absl::flat_hash_map<uint64_t, std::vector<int>> verified_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTED_MODULE_H_
