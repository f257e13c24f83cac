// GradientReplay: the memory of gradients from their arrival to the owners'
// shards, as sharding/gradient has it (gradients.h, flat_gradient.h,
// reduction.h): the same buckets, the same order, no values.
#ifndef ENGINE_PLAN_REPLAY_GRADIENT_REPLAY_H_
#define ENGINE_PLAN_REPLAY_GRADIENT_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/plan/replay/plan_ledger.h"
#include "engine/plan/replay/planned_flat.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class GradientReplay {
 public:
  // `flats` and `held` outlive this.
  GradientReplay(const std::vector<PlannedFlat>& flats,
                 const GradientOptions& options, int world_size,
                 PlanLedger* held);

  // Begins a backward; `gradients[i]`: the number of gradients expected for
  // flat i. Without `reduces` they stay on this rank.
  void Begin(const std::vector<int>& gradients, bool reduces);
  // Copies a gradient of a flat to its local gradient, which exists from now
  // on.
  void Copy(size_t flat) { EnsureLocal(flat, item_bytes(flat)); }
  // A gradient of a flat has arrived and been freed.
  void Arrived(size_t flat);
  // Ends the backward, which ranks have agreed on.
  void End();
  // Drops the gradients: the step was made.
  void Zero();

  // Bytes that this rank sends for sums, without factors of the world size.
  int64_t reduced_bytes() const { return reduced_bytes_; }
  int64_t reductions() const { return reductions_; }

 private:
  struct State {
    int missing = 0;
    bool expected = false;
    int64_t local_bytes = 0;    // 0: there is none
    int64_t reduced_bytes = 0;  // the same
    int64_t sums_bytes = 0;
    bool in_place = false;  // the step's gradient lies in the local one
    bool in_step = false;   // micro-batches before this one are in it
  };
  void MakeBuckets(int world_size);
  void EnsureLocal(size_t i, int64_t bytes_of_item);
  void EnsureReduced(size_t i);
  void FreeLocal(size_t i);
  void LaunchReady(bool all);
  void Start(std::vector<size_t> bucket);
  void Finish();
  void FinishStoring();
  void UseUp(size_t i);
  int64_t item_bytes(size_t i) const;

  const std::vector<PlannedFlat>& flats_;
  const GradientOptions options_;
  const bool alone_;  // one rank
  PlanLedger* const held_;
  std::vector<State> states_;
  std::vector<std::vector<size_t>> buckets_;
  size_t cursor_ = 0;
  bool reduces_ = true;
  std::vector<size_t> in_flight_;
  std::vector<size_t> storing_;  // elsewhere
  int64_t packed_bytes_ = 0;     // of what is in flight
  int64_t reduced_bytes_ = 0, reductions_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_GRADIENT_REPLAY_H_
