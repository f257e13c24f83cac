// EarlySteps: steps of units on the update stream (offload/update_stream.h),
// also speculative ones, made before Step is called. They are for units on the
// CPU with states on a disk, and units on a device with states on the host.
//
// Threads: none of its own; the caller orders the calls. units() may be called
// from any.
#ifndef OPTIM_EARLY_STEPS_H_
#define OPTIM_EARLY_STEPS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "comm/communicator.h"
#include "offload/update_stream.h"
#include "optim/apply_step.h"
#include "optim/states/optimizer_states.h"
#include "optim/states/parameter_groups.h"
#include "optim/states/step_counts.h"
#include "optim/unit_step.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class EarlySteps {
 public:
  using Flats = OptimizerStates::Flats;

  // All outlive this.
  EarlySteps(Flats flats, const ParameterGroups* groups,
             const OptimizerStates* states, const StepCounts* counts)
      : flats_(std::move(flats)),
        groups_(*groups),
        states_(*states),
        counts_(*counts),
        units_(flats_.size()) {}

  // Sets the bytes of new values that may wait in memory. 0: no early steps.
  void SetBytes(int64_t bytes) { bytes_ = bytes; }
  // Whether some units may be stepped early. LOCAL.
  bool MayStart() const;
  // Steps a unit whose gradient has arrived, for a next step that is expected
  // to have these options and this factor. New values go to memory and disk
  // space of their own, so that Step only has to confirm them, or repeats the
  // step. Does nothing where there is no more room. REQUIRES: the outcome of
  // the last step is known (StepCounts::Uncount). LOCAL; waits for writes of
  // the last step, and is ASYNC afterwards.
  void Start(size_t unit, FlatGradient* gradient,
             const std::vector<OptimizerOptions>& options, double factor);
  // Drops all early steps, and frees the memory of units that cannot be stepped
  // early as they are now. LOCAL, blocking.
  void Drop();
  // The number of early steps of units that were right; on a device it is known
  // some time after the step.
  int64_t units() const { return taken_; }
  int64_t resident_bytes() const;

  // ---- For the step.

  void BeginStep();
  // Makes `step` on the update stream, behind the program, if the unit is
  // updated on the host or has states on a disk: by its early step where that
  // turns out to be right. Takes its gradient, unless the unit is on a device
  // and each rank has all of it. Returns when its new values can be read;
  // nullopt: they are to be made at once (StepHere). `factor`: one for all
  // units of a step. LOCAL, ASYNC. Errors are TierRoom's.
  absl::StatusOr<std::optional<CommFuture>> Step(size_t unit,
                                                 const UnitStep& step,
                                                 const GradientFactor& factor,
                                                 Gradients* gradients);
  // Drops what was not committed.
  void EndStep();

 private:
  struct Pushed {
    UnitStep step;
    UpdateStream::Early update;
    std::shared_ptr<EarlyHost> on_host;  // null: on a disk
  };
  struct Unit {
    std::optional<Pushed> pushed;
    // Memory for the new masters, or working shard, of an early step. It is
    // kept from step to step, since allocating memory costs as much as the
    // step.
    std::shared_ptr<FlatBuffer> next;
  };

  bool MayStartOnDisk(size_t unit) const;
  bool MayStartOnHost(size_t unit) const;
  int64_t NextBytes(size_t with) const;
  absl::Status MakeRoom(size_t unit);
  absl::StatusOr<Pushed> Push(size_t unit, const UnitStep& step,
                              FlatGradient* gradient);
  void Prefetch();
  absl::StatusOr<UpdateStream::Pushed> StepOnHost(size_t unit,
                                                  const UnitStep& step,
                                                  Gradients* gradients);
  UpdateStream::Pushed StepOnDisk(size_t unit, const UnitStep& step,
                                  Gradients* gradients);
  // Commits the unit's early step if it equals `step`, on the CPU, and takes
  // its gradient; nullopt: it does not.
  std::optional<UpdateStream::Pushed> Keep(size_t unit, const UnitStep& step,
                                           Gradients* gradients);
  // As Keep, for a unit on a device: the factor, which the device may decide,
  // is compared later. Null: there is no such early step.
  std::shared_ptr<EarlyHost> KeepOnHost(size_t unit, const UnitStep& step);

  const Flats flats_;
  const ParameterGroups& groups_;
  const OptimizerStates& states_;
  const StepCounts& counts_;
  std::vector<Unit> units_;
  std::vector<size_t> order_;  // in which Start was called for units on a disk,
                               // since the last step
  int64_t bytes_ = 0;
  int64_t taken_before_ = 0;  // taken_ when the step began
  // The step's factor; it goes to the host for the first unit that needs it.
  std::optional<HostFactor> factor_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace tessera
#endif  // OPTIM_EARLY_STEPS_H_
