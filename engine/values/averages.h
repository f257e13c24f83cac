// Exchanges the parameters with their averages (optimizer.params.ema_decay, or
// those of schedule-free AdamW): Engine::SwapInAverages and SwapOutAverages, of
// which this is the inside.
#ifndef ENGINE_VALUES_AVERAGES_H_
#define ENGINE_VALUES_AVERAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/update_guard.h"
#include "offload/tiered_buffer.h"

namespace tessera {

class Averages {
 public:
  // These outlive this.
  Averages(UpdateGuard* guard, const Optimization* optimization,
           const OptimizerGroups* groups)
      : guard_(guard), optimization_(*optimization), groups_(*groups) {}

  // `in`: the parameters become their averages; else what they were again.
  // COLLECTIVE; takes memory for the largest unit's owned part. Of
  // schedule-free AdamW masters are kept where its states are, owned parts of
  // all units, until they are back: the average is made of them and of z, which
  // must both stay.
  absl::Status Swap(bool in);

  // Of masters that are kept.
  int64_t resident_bytes() const;
  void Clear() { training_points_.clear(); }

 private:
  bool IsScheduleFree() const;
  absl::Status Check(bool in) const;
  template <typename Visit>
  void VisitStepped(const FlatParameter& flat, const Visit& visit) const;
  absl::Status MakeRoom();
  absl::Status EvaluateUnit(size_t u);
  absl::Status TrainUnit(size_t u);
  absl::Status SwapUnit(size_t u);

  UpdateGuard* const guard_;
  const Optimization& optimization_;
  const OptimizerGroups& groups_;
  // By flat, masters where gradients are taken, while the parameters are
  // averages that no state holds (schedule-free AdamW).
  std::vector<TieredBuffer> training_points_;
};

}  // namespace tessera
#endif  // ENGINE_VALUES_AVERAGES_H_
