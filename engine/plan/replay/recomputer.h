// Recomputer: finds a Recomputation (recomputation.cc), and the activations
// that are moved between forward and backward (moved_activations.cc). Only
// these two files include it.
#ifndef ENGINE_PLAN_REPLAY_RECOMPUTER_H_
#define ENGINE_PLAN_REPLAY_RECOMPUTER_H_

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "engine/plan/replay/recomputation.h"
#include "sharding/trace/trace.h"

namespace tessera {

// An operator of the forward.
struct TracedOperation {
  int64_t event = 0;  // its kOperator
  std::vector<int32_t> made, touched;
  std::vector<TracedUse> uses;
};

struct TracedRegion {
  int32_t first = 0;  // parameter
  int64_t end = 0;    // the first event after it
  int64_t last_node = -1;
  std::vector<TracedOperation> operations;
  // Allocations that are given up, once the region is closed.
  std::vector<int32_t> given_up;
  std::vector<const TracedOperation*> needed;  // in order
  // For each allocation that its nodes saved, the event in backward at which
  // the first node asks for it.
  std::map<int32_t, int64_t> saved;
  // Allocations that are moved until backward, of `saved` and of those that
  // only the tape holds.
  std::vector<int32_t> moved, moved_of_tape;
  int64_t restored = -1;  // event before which they are back; -1: never
};

// The life of an allocation.
struct TracedLife {
  int maker = -1;  // region
  bool held = false;
  bool cast = false;
  bool forward = false;  // it is made in the forward
  int64_t bytes = 0;
  int64_t freed = 0;  // event; the number of events: never
  int64_t last_forward_use = -1;
  int64_t own_use = -1;    // the first by a node of its region, in backward
  int64_t other_use = -1;  // the last by another node
  // It stays, since a node asks for it that is in no region, or in one that
  // leaves it where it is.
  bool stays = false;
  int64_t held_until = -1;  // by tapes
};

class Recomputer {
 public:
  Recomputer(const Trace& trace, const RecomputationOptions& options);
  Recomputation Run();

 private:
  void FindRegions();
  void FindLives();
  void FindOperations();
  void FindBackwardUses();
  bool IsWanted(const TracedLife& life) const;
  void FindHeld(int number);
  void Close(int number);
  std::set<int32_t> FindNeeded(int number, const std::vector<int32_t>& wanted);
  int64_t NodeStart(int64_t event) const;
  std::vector<int32_t> UnpackedFirst(int64_t start) const;
  int64_t EndOfOperator(int64_t event) const;
  int64_t GoneFrom(const TracedRegion& region, const TracedLife& life) const;
  Rerun RerunOf(const TracedRegion& region) const;
  // moved_activations.cc
  bool Moves(int32_t allocation) const;
  int64_t SavedBytes(const TracedRegion& region) const;
  void Move(const std::set<int32_t>& held_by_tape, TracedRegion* region);
  void FindStaying();
  std::map<int32_t, int64_t> FindLeft() const;
  std::vector<int64_t> FindWanted() const;
  void AddMoved(Recomputation* made);
  TracedLife& life(int32_t allocation) {
    return lives_[static_cast<size_t>(allocation)];
  }
  const TracedLife& life(int32_t allocation) const {
    return lives_[static_cast<size_t>(allocation)];
  }
  const TraceEvent& event(int64_t i) const {
    return trace_.events[static_cast<size_t>(i)];
  }
  int RegionOf(int64_t forward) const {
    return forward < 0 || forward >= backward_
               ? -1
               : region_of_[static_cast<size_t>(forward)];
  }

  const Trace& trace_;
  const RecomputationOptions& options_;
  const int64_t backward_, end_;
  std::vector<TracedRegion> regions_;
  std::vector<int> region_of_;     // by event of the forward; -1: it is of none
  std::vector<TracedLife> lives_;  // by allocation
  int64_t kept_bytes_ = 0;         // of the budget
};

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_RECOMPUTER_H_
