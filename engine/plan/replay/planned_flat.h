// PlannedFlat: a flat parameter as an engine would make it, in numbers: what
// each of its elements costs, and where it lies. All that is predicted of sizes
// begins here: plans (stage_plan.h), and what "auto" becomes without one
// (engine/plan/stage_choice.h).
#ifndef ENGINE_PLAN_REPLAY_PLANNED_FLAT_H_
#define ENGINE_PLAN_REPLAY_PLANNED_FLAT_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/build/group_choice.h"
#include "engine/build/settings.h"
#include "engine/build/tiers.h"
#include "engine/plan/replay/planned_memory.h"
#include "sharding/partition/flat_plan.h"

namespace tessera {

struct PlannedFlat {
  int64_t whole_numel = 0;  // P, with gaps and padding
  int64_t shard_numel = 0;  // S, that a rank owns where the stage shards
  // Bytes per element.
  int64_t working_bytes = 4;
  int64_t master_bytes = 0;  // with memory of its own, else 0
  int64_t reduce_bytes = 4;
  int64_t gradient_bytes = 4;
  // Bytes per element of gradients that are added up before they are reduced.
  int64_t local_bytes = 4;
  bool keeps_sums = true;     // the step's gradient is of the sums' dtype
  int64_t state_bytes = 4;    // of the dtype that a step computes in
  int64_t stepped_bytes = 4;  // of masters, in whose memory a step may compute
  bool splits_masters = false;  // into working copy and remainders
  // Bytes of all optimizer states of 64 elements.
  int64_t optimizer_block_bytes = 2 * 4 * 64;
  // Bytes of states with shapes of their own, on every rank.
  int64_t shaped_state_bytes = 0;
  bool trained = true;
  bool sharded_parameters = false;
  bool sharded_gradients = false;
  bool sharded_optimizer = false;
  Tier states = Tier::kMemory;  // masters with memory of their own, moments
  Tier parameters = Tier::kMemory;
  Tier gradients = Tier::kMemory;  // shards, except those of two units
  // Sharded over one rank: what is whole is the shard itself.
  bool alone = false;

  int64_t owned_numel() const {
    return sharded_optimizer ? shard_numel : whole_numel;
  }
};

struct PlannedFlats {
  std::vector<PlannedFlat> flats;
  TierChoice tiers;
  // Bytes in which states and parameters on a disk are updated.
  int64_t stream_bytes = 0;
};

// Returns flats as `settings` make them at a stage, over the ranks of a shard
// group. `groups`: empty if there is no optimizer. `on_cpu`: where they will
// be.
PlannedFlats PlannedFlatsOf(const Settings& settings,
                            const ParameterGroups& groups,
                            absl::Span<const FlatPlan> flats, int stage,
                            bool on_cpu);

// Returns what a flat takes between steps, without gradients. `shared`: a
// host's ranks have one working copy.
PlannedBytes BytesBetweenSteps(const PlannedFlat& flat, bool has_optimizer,
                               bool shared);

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_PLANNED_FLAT_H_
