// EngineLife: knows whether an engine may be called, or is closed, has lost its
// states, runs a Backward, or has lent its parameters for a while.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_MODEL_ENGINE_LIFE_H_
#define ENGINE_MODEL_ENGINE_LIFE_H_

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "engine/model/optimization.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class EngineLife {
 public:
  // `optimization`, whose gradients a Backward fills, outlives this.
  explicit EngineLife(const Optimization* optimization)
      : optimization_(optimization) {}

  // Returns FailedPrecondition after Close and within a Backward, and the error
  // of Lose. LOCAL.
  absl::Status CheckUsable() const;
  // Does the same for all calls except Step, which is the only one that may
  // follow a Backward with sharding.step_in_backward. LOCAL.
  absl::Status CheckOpen() const;
  // Returns FailedPrecondition while a scope of Engine::Summon is open. LOCAL.
  absl::Status CheckNotSummoned() const;
  // Returns FailedPrecondition while the parameters are their averages. LOCAL.
  absl::Status CheckNotAveraged() const;

  bool closed() const { return closed_; }
  void Close() { closed_ = true; }
  // Marks masters or states as lost, because a call that changes them ended
  // half way: they are neither old nor new, and training with them is refused.
  // LOCAL.
  void Lose(const absl::Status& status);
  // Units may be stepped and not published: a Step must follow. Identical on
  // all ranks.
  void SetHalfStepped(bool half_stepped) { half_stepped_ = half_stepped; }
  bool half_stepped() const { return half_stepped_; }
  // Set by Engine::SwapInAverages and SwapOutAverages.
  bool averaged() const { return averaged_; }
  void SetAveraged(bool averaged) { averaged_ = averaged; }
  // Track the flats in open scopes of Engine::Summon.
  bool summoned(const FlatParameter* flat) const {
    return summoned_.contains(flat);
  }
  void BeginSummon(const FlatParameter* flat) { summoned_.insert(flat); }
  void EndSummon(const FlatParameter* flat) { summoned_.erase(flat); }

 private:
  const Optimization* const optimization_;
  bool closed_ = false;
  bool averaged_ = false;
  bool half_stepped_ = false;
  absl::Status lost_;
  absl::flat_hash_set<const FlatParameter*> summoned_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_ENGINE_LIFE_H_
