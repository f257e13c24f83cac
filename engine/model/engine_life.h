// EngineLife: whether an engine may be called: it is closed, its states are
// lost, a Backward runs, the parameters are someone else's for a while.
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

  // FailedPrecondition after Close, and within a Backward; what has been lost.
  // LOCAL.
  absl::Status CheckOpen() const;
  // FailedPrecondition while a scope of Engine::Summon is open. LOCAL.
  absl::Status CheckNotSummoned() const;
  // FailedPrecondition while the parameters are their averages. LOCAL.
  absl::Status CheckNotAveraged() const;

  bool closed() const { return closed_; }
  void Close() { closed_ = true; }
  // A call that changes masters or states has ended half way: what there is is
  // neither the old nor the new, and nothing trains on with it. LOCAL.
  void Lose(const absl::Status& status);
  // By Engine::SwapInAverages and SwapOutAverages.
  bool averaged() const { return averaged_; }
  void SetAveraged(bool averaged) { averaged_ = averaged; }
  // Flats in open scopes of Engine::Summon, by these.
  bool summoned(const FlatParameter* flat) const {
    return summoned_.contains(flat);
  }
  void BeginSummon(const FlatParameter* flat) { summoned_.insert(flat); }
  void EndSummon(const FlatParameter* flat) { summoned_.erase(flat); }

 private:
  const Optimization* const optimization_;
  bool closed_ = false;
  bool averaged_ = false;
  absl::Status lost_;
  absl::flat_hash_set<const FlatParameter*> summoned_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_ENGINE_LIFE_H_
