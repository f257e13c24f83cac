// OptimizerStates: owns the optimizer's states of the units: moments and the
// average of masters in the units' ShardStates, and states with shapes of their
// own (optim/factored).
//
// Threads: none of its own; the caller orders the calls.
#ifndef OPTIM_STATES_OPTIMIZER_STATES_H_
#define OPTIM_STATES_OPTIMIZER_STATES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "offload/shard_states.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/factored/factored_states.h"
#include "optim/kernels/element_step.h"
#include "optim/states/parameter_groups.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class OptimizerStates {
 public:
  using Flats = std::vector<std::shared_ptr<FlatParameter>>;

  // `groups` outlives this.
  OptimizerStates(Flats flats, const ParameterGroups* groups)
      : flats_(std::move(flats)), groups_(*groups), units_(flats_.size()) {}
  // Frees the states.
  ~OptimizerStates();
  OptimizerStates(const OptimizerStates&) = delete;
  OptimizerStates& operator=(const OptimizerStates&) = delete;

  // The options and the formula of all parameters of a unit.
  const OptimizerOptions& OptionsOf(size_t unit) const;
  Formula FormulaOf(size_t unit) const {
    return tessera::FormulaOf(OptionsOf(unit));
  }

  // The names of a unit's moments, whether it has them or not: the formula's,
  // and "ema" if an average is kept.
  std::vector<std::string> Names(size_t unit) const;
  // Whether a moment cannot be negative (StepState).
  bool IsNonNegative(size_t unit, size_t moment) const;
  // [owned] each, in the order of Names; none where the unit has no states.
  std::vector<TieredBuffer>& moments(size_t unit) const {
    return flats_[unit]->states().moments();
  }
  // The average of masters, or null.
  TieredBuffer* average(size_t unit) const;
  // States with shapes of their own, whole on every rank; valid until states
  // are made or dropped. REQUIRES: FlatParameter::PrepareUpdate.
  const FactoredStates& factored(size_t unit) const {
    return units_[unit].factored;
  }

  // Makes a unit's states as zeros, if they do not exist, and its masters if it
  // was unfrozen. LOCAL. ResourceExhausted; nothing is made then.
  absl::Status Make(size_t unit);
  bool made(size_t unit) const { return units_[unit].made; }
  // Which units have states: 1 or 0 each.
  std::vector<uint8_t> has() const;
  // Makes or drops states so that these units have them. LOCAL.
  // ResourceExhausted.
  absl::Status Match(const std::vector<uint8_t>& has);

  // Whether a unit's states exist and were never written: they are zeros.
  // Writers call SetWritten.
  bool has_zeros(size_t unit) const {
    return units_[unit].made && !units_[unit].written;
  }
  void SetWritten(size_t unit) { units_[unit].written = true; }

  // Returns the bytes of memory.
  int64_t resident_bytes() const;

 private:
  struct Unit {
    FactoredStates factored;
    bool made = false;  // they are there, if it has any
    bool written = false;
  };
  absl::Status Allocate(size_t unit);
  absl::Status AllocateHostBuffers(size_t unit);
  void Drop(size_t unit);

  const Flats flats_;
  const ParameterGroups& groups_;
  std::vector<Unit> units_;
};

}  // namespace tessera
#endif  // OPTIM_STATES_OPTIMIZER_STATES_H_
