// EarlySteps: steps of units that are made before they are asked for, on the
// update stream (offload/update_stream.h): those of units whose states lie on a
// disk (on the CPU) or on the host (on a device).
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

  // Bytes of new values that may wait in memory. 0: nothing is made early.
  void SetBytes(int64_t bytes) { bytes_ = bytes; }
  // Some units may be stepped early. LOCAL.
  bool MayStart() const;
  // A unit's gradient has come, and it is expected that the next step is with
  // these options and this factor: the unit is stepped now, into memory and
  // room on the disk of its own, so that the step has only to say that it was
  // right, or does it again. Nothing is done where there is no more room.
  // REQUIRES: what became of the last step is known (StepCounts::Uncount).
  // LOCAL; waits for what of the last step is still being written, and is ASYNC
  // then.
  void Start(size_t unit, FlatGradient* gradient,
             const std::vector<OptimizerOptions>& options, double factor);
  // None of these was right. LOCAL, blocking.
  void Drop();
  // Units of which a step had only to say that its values are right; of a
  // device some time after the step.
  int64_t units() const { return taken_; }
  int64_t resident_bytes() const;

  // ---- For the step.

  void BeginStep();
  // The unit's new values if `step`, on the CPU, was made early: its gradient
  // is taken then.
  std::optional<UpdateStream::Pushed> Keep(size_t unit, const UnitStep& step,
                                           Gradients* gradients);
  // The same of a unit on a device, by what is known here: the factor, which
  // the device may decide, is compared later. Or null.
  std::shared_ptr<EarlyHost> KeepOnHost(size_t unit, const UnitStep& step);
  void EndStep();

 private:
  struct Pushed {
    UnitStep step;
    UpdateStream::Early update;
    std::shared_ptr<EarlyHost> on_host;  // null: on a disk
  };
  struct Unit {
    std::optional<Pushed> pushed;
    // What an early step writes instead of memory: masters, or the working
    // shard. It is kept from step to step, since new memory costs as much as
    // the step.
    std::shared_ptr<FlatBuffer> next;
  };

  bool OnDisk(size_t unit) const;
  bool OnHost(size_t unit) const;
  int64_t NextBytes(size_t with) const;
  absl::Status MakeRoom(size_t unit);
  absl::StatusOr<Pushed> Push(size_t unit, const UnitStep& step,
                              FlatGradient* gradient);
  void Foresee();

  const Flats flats_;
  const ParameterGroups& groups_;
  const OptimizerStates& states_;
  const StepCounts& counts_;
  std::vector<Unit> units_;
  std::vector<size_t> order_;  // of Start on a disk, since the last step
  int64_t bytes_ = 0;
  int64_t taken_before_ = 0;  // the step that goes on
  std::atomic<int64_t> taken_{0};
};

// The gradient of a unit on a device is in the states' kGradient from here on.
// ASYNC. Errors as TieredBuffer::CopyFrom.
absl::Status BringGradient(FlatParameter* flat, FlatGradient* gradient);

}  // namespace tessera
#endif  // OPTIM_EARLY_STEPS_H_
