// Residency: which units stay whole between uses where parameters are sharded.
//
// The last `live_units` units touched stay whole; another one that is touched
// takes the place of the one that was touched longest ago. A pinned unit is
// never freed. At the end of backward and of a step everything is freed.
//
// Ranks that run the same operators free and gather alike, since the choice
// depends on the order of touches alone.
//
// Threads: any.
#ifndef SHARDING_RESIDENCY_H_
#define SHARDING_RESIDENCY_H_

#include <atomic>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

class Unit;

class Residency {
 public:
  // live_units = 0: a unit is freed as soon as nothing pins it.
  explicit Residency(int live_units) : live_units_(live_units) {}

  // `unit` is about to be pinned: frees what it takes the place of.
  void WillUse(Unit* unit);
  // `unit` will not be used again; it may be destroyed.
  void Forget(Unit* unit);
  // Frees every unit that is not pinned.
  void FreeAll();
  bool free_after_use() const { return live_units_ == 0; }

 private:
  // Frees them; those that are pinned stay on the list, to be freed later.
  void FreeOrKeep(const std::vector<Unit*>& victims);

  const int live_units_;
  std::atomic<Unit*> newest_{nullptr};
  absl::Mutex mutex_;
  std::vector<Unit*> touched_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace tessera
#endif  // SHARDING_RESIDENCY_H_
