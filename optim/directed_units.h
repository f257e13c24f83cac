// DirectedUnits: one step of all units whose algorithm is a directed one
// (optim/directed_step.h). It is made within the call, whatever tier states lie
// in: offloaded states are in memory for each half.
#ifndef OPTIM_DIRECTED_UNITS_H_
#define OPTIM_DIRECTED_UNITS_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optim/directed_step.h"
#include "optim/states/optimizer_states.h"
#include "optim/states/parameter_groups.h"
#include "optim/states/step_counts.h"
#include "optim/unit_step.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// Returns Unimplemented where a unit with this formula cannot be stepped this
// way: its states are off its device, or it is Adafactor on complex numbers.
absl::Status CheckDirected(const FlatParameter& flat, Formula formula);

class DirectedUnits {
 public:
  // What a step works on; all of it outlives this.
  struct Parts {
    const OptimizerStates::Flats& flats;
    const ParameterGroups& groups;
    const OptimizerStates& states;
    const StepCounts& counts;
    Gradients* gradients;
    bool* changed;  // set when something has been changed
  };
  DirectedUnits(const Parts& parts, const GradientFactor& factor)
      : parts_(parts), factor_(factor) {}

  // Steps and publishes these units, which are directed ones with
  // a gradient. COLLECTIVE. It ends at the first error.
  absl::Status Step(const std::vector<size_t>& units);

 private:
  absl::StatusOr<DirectedUnit> Begin(size_t u);
  absl::StatusOr<DirectedUnit> Direct(size_t u);
  absl::Status Descend(size_t u, const DirectedUnit& unit,
                       const Completion& completion);
  absl::Status DescendByNorms(const std::vector<size_t>& units,
                              std::vector<DirectedUnit> directed);
  absl::Status StepLamb(const std::vector<size_t>& units);
  absl::Status StepMuon(const std::vector<size_t>& units);
  absl::Status StepAdafactor(const std::vector<size_t>& units);
  absl::StatusOr<bool> Apply(size_t u, const UnitStep& step,
                             const at::Tensor& gradient);

  const Parts parts_;
  const GradientFactor factor_;
  // The factor 1; on a device that may skip the step it skips the descent, too.
  GradientFactor one_;
};

}  // namespace tessera
#endif  // OPTIM_DIRECTED_UNITS_H_
