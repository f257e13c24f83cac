// ShardedOptimizer: an optimizer on the segments of flat shards, with the bits
// of the same kernel on whole parameters, whatever the shards.
//
// On the CPU, and on devices that have it (optim/device_kernels.h), a step is
// StepElements (optim/kernels/element_step.h), where an element has the same
// bits wherever it lies; a 16-bit working copy is written in the same pass.
// AdamW of float64 goes to libtorch's fused kernel, which groups elements the
// same way at every cut (base/layout/layout.h).
//
// With libtorch_exact all go through the operators that torch::optim::AdamW
// calls (exp_avg.mul_().add_() and so on), one after the other, and have its
// bits: some ten passes over memory instead of one. With libtorch_fused float32
// goes to libtorch's fused kernel, too.
//
// States that lie on a disk, or on the host while their unit is on a device,
// are stepped slice by slice behind the program (optim/apply_step.h), with the
// same bits; perhaps before Step is called (optim/early_steps.h).
//
// A parameter without a gradient is skipped: no decay, no momentum, and its own
// step count stays (bias correction), as in libtorch.
#ifndef OPTIM_SHARDED_OPTIMIZER_H_
#define OPTIM_SHARDED_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/apply_step.h"
#include "optim/directed_units.h"
#include "optim/early_steps.h"
#include "optim/states/optimizer_states.h"
#include "optim/states/parameter_groups.h"
#include "optim/states/step_counts.h"
#include "optim/steps_in_backward.h"
#include "optim/unit_step.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class ShardedOptimizer {
 public:
  // Allocates the states of this rank's part of every trainable unit; a unit
  // that is unfrozen later gets its states with its first gradient. LOCAL.
  // ResourceExhausted; Unimplemented: a device that has no kernels for the
  // formula.
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(
      std::vector<std::shared_ptr<FlatParameter>> flats,
      ParameterGroups groups);

  // Begins a step: allocates memory that Step needs, for units that were
  // unfrozen. LOCAL. ResourceExhausted; nothing has been stepped then.
  absl::Status Prepare(const Gradients& gradients);
  // Updates the owned part of every parameter that has a gradient, unit by
  // unit, with gradients * factor, and publishes each unit while it is in the
  // caches (FlatParameter::PublishOwned); the gradients may hold that product
  // afterwards. COLLECTIVE as PublishOwned is, and for algorithms that need
  // whole parameters (optim/directed_step.h). REQUIRES: Prepare, and
  // FlatParameter::PrepareUpdate of all. The first error ends the step. On
  // devices all of it is ASYNC, on the current stream. Units with offloaded
  // states are changed in the background, published at once with a valid
  // `updated`, and their gradients are gone. This call waits for those of them
  // that cannot be freed, unless FlatParameterOptions::overlap is set.
  absl::Status Step(Gradients* gradients, const GradientFactor& factor = {});
  // Whether the last Step returned an error after it had stepped some units, or
  // after gradients had been changed for it: it cannot be repeated. LOCAL.
  bool half_stepped() const { return half_stepped_; }
  // Notes that the gradients of the next Step are changed from here on, in ways
  // that must not be repeated. REQUIRES: Prepare. LOCAL.
  void NoteChangedGradients() { half_stepped_ = true; }

  // The units' states, for checkpoints.
  OptimizerStates& states() { return *states_; }
  const OptimizerStates& states() const { return *states_; }
  // Counts of steps done. A Step that the device has skipped is uncounted
  // (StepCounts::Uncount).
  StepCounts& counts() { return *counts_; }
  // Units that are stepped before Step.
  EarlySteps& early() { return *early_; }
  // Those that were stepped for good: Step publishes and counts them, and steps
  // what is left of them.
  StepsInBackward& in_backward() { return *in_backward_; }

  // Sets each group's options for the steps from now on. REQUIRES: formulas and
  // types of states stay the same.
  void SetOptions(std::vector<OptimizerOptions> options) {
    groups_.options = std::move(options);
  }
  const ParameterGroups& groups() const { return groups_; }
  // Whether a program's own optimizer steps all units (optim/custom). It must
  // not be called for a step that may be dropped, so there are no early steps,
  // and Step is called only when it is known that the step is not skipped.
  bool is_custom() const { return groups_.options[0].custom != nullptr; }
  // Returns the names of all units' formulas: "adamw", "adamw+muon".
  std::string name() const;
  // Returns the bytes of memory, including buffers for states on a disk.
  int64_t resident_bytes() const;

 private:
  // A unit whose update is in progress, to be published when it has ended.
  struct Awaited {
    size_t flat;
    CommFuture updated;
  };
  ShardedOptimizer(std::vector<std::shared_ptr<FlatParameter>> flats,
                   ParameterGroups groups);
  absl::Status CheckKernels(size_t u) const;
  absl::Status StepUnits(const std::vector<size_t>& units, Gradients* gradients,
                         const GradientFactor& factor,
                         std::vector<Awaited>* awaited);
  absl::Status StepUnit(size_t u, Gradients* gradients,
                        const GradientFactor& factor, UnitStep::Counts* counts,
                        OwnedChange* change);

  const std::vector<std::shared_ptr<FlatParameter>> flats_;
  ParameterGroups groups_;
  std::unique_ptr<OptimizerStates> states_;
  std::unique_ptr<StepCounts> counts_;
  std::unique_ptr<EarlySteps> early_;
  std::unique_ptr<StepsInBackward> in_backward_;
  std::vector<bool> is_directed_;  // by unit: DirectedUnits steps it
  bool half_stepped_ = false;
};

}  // namespace tessera
#endif  // OPTIM_SHARDED_OPTIMIZER_H_
