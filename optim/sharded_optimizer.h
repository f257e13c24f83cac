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
// States that lie on a disk are streamed through (offload/update_stream.h);
// those on the host, of units on a device, are updated there
// (optim/host_step.h): with the same bits.
//
// A parameter without a gradient is skipped: no decay, no momentum, and its own
// step count stays (bias correction), as in libtorch.
#ifndef OPTIM_SHARDED_OPTIMIZER_H_
#define OPTIM_SHARDED_OPTIMIZER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"
#include "optim/algorithms/average_weights.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/directed_step.h"
#include "optim/factored/factored_states.h"
#include "optim/host_step.h"
#include "optim/parameter_groups.h"
#include "optim/streamed_step.h"
#include "optim/unit_step.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class ShardedOptimizer {
 public:
  // Allocates the states of this rank's part of every trainable unit, StatesOf
  // the formula, owned elements each; another unit's when it first has a
  // gradient (it was unfrozen). LOCAL. ResourceExhausted; Unimplemented of a
  // device that has no kernels for the formula.
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(
      std::vector<std::shared_ptr<FlatParameter>> flats,
      ParameterGroups groups);

  // Memory for what Step needs: of units that were unfrozen. LOCAL.
  // ResourceExhausted; nothing has been stepped then.
  absl::Status Prepare(const Gradients& gradients);
  // Updates the owned part of every parameter that has a gradient, unit by
  // unit, with gradients * factor; the gradients may hold that afterwards.
  // LOCAL, but COLLECTIVE of algorithms that need whole parameters
  // (optim/directed_step.h). REQUIRES: Prepare, and
  // FlatParameter::PrepareUpdate of all.
  // `after` is called when a unit is done, while it is in the caches: to
  // publish it (FlatParameter::PublishOwned; `working_written` is for that). An
  // error of it ends the step there.
  // On devices all of it is ASYNC, on the current stream. Units whose states
  // lie elsewhere are changed behind the call: `after` is called at once, with
  // a valid `updated` (FlatParameter::PublishOwned), and must be given; their
  // gradients are gone. Of these, such as cannot be freed are waited for by
  // this call.
  using AfterUnit = std::function<absl::Status(
      size_t flat, bool working_written, const CommFuture& updated)>;
  absl::Status Step(Gradients* gradients, const GradientFactor& factor = {},
                    const AfterUnit& after = nullptr);
  // A unit's gradient has come, and it is expected that the next Step is with
  // these: where its states lie on a disk (on the CPU) or on the host (on a
  // device) it is stepped now, into memory and room on the disk of its own, so
  // that Step has only to say that it was right, or does it again. No longer
  // while `early_bytes` of new values are waiting in memory, or where there is
  // no more room. REQUIRES: what became of the last Step is known (Uncount).
  // LOCAL; waits for what of the last Step is still being written, and is ASYNC
  // then.
  void StartEarly(size_t flat, FlatGradient* gradient,
                  const std::vector<OptimizerOptions>& options, double factor);
  // Some units may be. LOCAL.
  bool MayStepEarly() const;
  // None of these was right. LOCAL, blocking.
  void DropEarly();
  void SetEarlyBytes(int64_t bytes) { early_bytes_ = bytes; }
  // Units for which a Step had only to say so, since Create. Any thread; of a
  // device some time after Step.
  int64_t early_units() const { return early_units_; }
  // The last Step has returned an error after it had stepped some units, or
  // what is to be stepped had been changed for it: it cannot be repeated.
  // LOCAL.
  bool half_stepped() const { return half_stepped_; }
  // The gradients of the Step that follows are changed from here on, in ways
  // that are not to be done twice. REQUIRES: Prepare. LOCAL.
  void NoteChangedGradients() { half_stepped_ = true; }
  // The device has skipped the last Step: it does not count. Once. LOCAL.
  void Uncount();

  // Of the steps from now on, of each group. REQUIRES: the same formulas and
  // types of states as before.
  void SetOptions(std::vector<OptimizerOptions> options) {
    groups_.options = std::move(options);
  }
  const ParameterGroups& groups() const { return groups_; }
  // That all parameters of a unit have.
  Formula FormulaOf(size_t flat) const {
    return tessera::FormulaOf(OptionsOf(flat));
  }
  // A program's own optimizer steps all of them (optim/custom). It is not asked
  // for what is not to be done after all, so nothing is made early, and Step is
  // told of a step that is not skipped.
  bool is_custom() const { return groups_.options[0].custom != nullptr; }
  // Of its states that are of its elements: the formula's, and "ema" if there
  // is one.
  std::vector<std::string> StateNames(size_t flat) const;
  // Whether a state of that number cannot be negative (StepState).
  bool IsNonNegative(size_t flat, size_t state) const {
    const StepStates states = StatesOf(FormulaOf(flat));
    return state < static_cast<size_t>(states.count) &&
           states.states[state].non_negative;
  }
  // The average of masters, or null.
  TieredBuffer* average(size_t flat);
  // Those with shapes of their own, whole on every rank: none where the unit
  // has none. Valid until its states are made or dropped. REQUIRES:
  // FlatParameter::PrepareUpdate.
  const std::vector<ShapedState>& shaped_states(int flat) const {
    return states_[static_cast<size_t>(flat)].factored.all();
  }
  // Of all units: "adamw", "adamw+muon".
  std::string name() const;

  // States of a unit, for checkpoints: StateNames, [owned] each; none
  // where the unit has none; perhaps on a disk. REQUIRES:
  // FlatParameter::PrepareUpdate.
  std::vector<TieredBuffer>& states(int flat) {
    return states_[static_cast<size_t>(flat)].moments;
  }
  // Whether a unit's states are there and have never been written: zeros. Who
  // writes them says so. LOCAL.
  bool has_zeros(int flat) const {
    return states_[flat].made && !states_[flat].written;
  }
  void SetWritten(int flat) { states_[flat].written = true; }
  // Which units have states, 1 or 0 each: those of trainable units and of such
  // as were unfrozen. And makes or drops states so that these have, for what a
  // checkpoint brings. LOCAL. ResourceExhausted.
  std::vector<uint8_t> has_state() const;
  absl::Status MatchStates(const std::vector<uint8_t>& has_state);
  // Steps done per parameter of the model, the same on all ranks.
  std::vector<int64_t>& parameter_steps() { return steps_; }
  // Of each group that schedule-free AdamW steps, the same on all ranks.
  const std::vector<AverageWeights>& average_weights() const {
    return weights_;
  }
  void SetAverageWeights(std::vector<AverageWeights> weights);
  // Of memory, buffers for what lies on a disk among it.
  int64_t resident_bytes() const;

 private:
  // Of a unit, by StartEarly.
  struct EarlyStep {
    UnitStep step;
    UpdateStream::Early update;
    std::shared_ptr<EarlyHost> on_host;  // null: on a disk
  };
  struct State {
    std::vector<TieredBuffer> moments;  // of the formula, [owned] each
    FactoredStates factored;
    bool made = false;  // they are there, if it has any
    // Where the CPU updates these for a device, on the host: the gradient if it
    // is not sharded, and what is on its way to the working copy, of its dtype.
    TieredBuffer gradient, working;
    bool written = false;
    std::optional<EarlyStep> early;
    // What early steps write instead of memory: masters, or the working copy.
    // Kept from step to step, since new memory costs as much as the step.
    std::shared_ptr<FlatBuffer> next;
  };
  // A unit's update is under way; to be published when it has ended.
  struct Awaited {
    size_t flat;
    CommFuture updated;
  };
  void CountStep(const FlatParameter& flat, const FlatGradient& gradient);
  std::vector<OptimizerOptions> WithShares(
      std::vector<OptimizerOptions> options) const;
  absl::Status StepUnits(Gradients* gradients, const GradientFactor& factor,
                         const AfterUnit& after, std::vector<Awaited>* awaited);
  CommFuture StartOnDisk(size_t u, const UnitStep& step, Gradients* gradients);
  // Of a unit on a disk, what is read and written; without its gradient.
  StreamedStep Streamed(size_t u, const UnitStep& step, bool early);
  bool AnyOnDisk(size_t u, FlatGradient* gradient);
  bool EarlyOnDisk(size_t u) const;
  bool EarlyOnHost(size_t u) const;
  // What a step of the unit writes, wherever it lies.
  std::vector<TieredBuffer*> WrittenBuffers(size_t u);
  int64_t NextBytes(size_t with);
  absl::Status MakeRoomForNext(size_t u);
  EarlyStep PushEarlyOnDisk(size_t u, const UnitStep& step,
                            FlatGradient* gradient);
  absl::StatusOr<EarlyStep> PushEarlyOnHost(size_t u, const UnitStep& step,
                                            FlatGradient* gradient);
  void DropQueuedEarly();
  void Foresee();
  std::optional<CommFuture> KeepEarly(size_t u, const UnitStep& step,
                                      Gradients* gradients);
  static CommFuture UpdatedOf(FlatParameter* flat,
                              const UpdateStream::Pushed& pushed);
  absl::StatusOr<CommFuture> StartOnHost(size_t u, const UnitStep& step,
                                         const HostFactor& factor,
                                         Gradients* gradients);
  // Without the gradient.
  HostStates HostStatesOf(size_t u);
  // The unit's gradient on the host.
  absl::StatusOr<TieredBuffer*> GradientOnHost(size_t u,
                                               FlatGradient* gradient);
  // An early step of the unit that may be the right one, by what is known here:
  // the factor, which the device may decide, is compared later. Or null.
  std::shared_ptr<const EarlyHost> KeepEarlyOnHost(size_t u,
                                                   const UnitStep& step);
  // Whether the working copy is written, too.
  absl::StatusOr<bool> StepHere(size_t u, const UnitStep& step,
                                const at::Tensor& gradient,
                                UnitStep::Counts* counts);
  // sharded_optimizer_directed.cc
  absl::Status StepDirected(Gradients* gradients, const GradientFactor& factor,
                            const AfterUnit& after);
  absl::StatusOr<DirectedUnit> Direct(size_t u, Gradients* gradients,
                                      const GradientFactor& factor);
  absl::Status Descend(size_t u, const DirectedUnit& unit,
                       const Completion& completion,
                       const FlatGradient& gradient, const GradientFactor& one,
                       const AfterUnit& after);
  absl::Status DescendByNorms(const std::vector<size_t>& units,
                              std::vector<DirectedUnit> directed,
                              Gradients* gradients, const GradientFactor& one,
                              const AfterUnit& after);
  absl::Status StepLamb(const std::vector<size_t>& units, Gradients* gradients,
                        const GradientFactor& factor, const GradientFactor& one,
                        const AfterUnit& after);
  absl::Status StepMuon(const std::vector<size_t>& units, Gradients* gradients,
                        const GradientFactor& factor, const GradientFactor& one,
                        const AfterUnit& after);
  absl::Status StepAdafactor(const std::vector<size_t>& units,
                             Gradients* gradients, const GradientFactor& factor,
                             const GradientFactor& one, const AfterUnit& after);
  absl::Status CheckDirected(size_t u) const;
  absl::Status CheckKernels(size_t u) const;
  const OptimizerOptions& OptionsOf(size_t u) const;
  absl::Status EnsureState(size_t flat);
  static absl::Status AllocateHostBuffers(const FlatParameter& flat,
                                          State* state);
  std::vector<std::shared_ptr<FlatParameter>> flats_;
  std::vector<State> states_;
  std::vector<int64_t> steps_;
  std::vector<size_t> counted_;  // whose number the last Step has raised
  std::vector<AverageWeights> weights_, weights_before_;  // it, by group
  ParameterGroups groups_;
  bool half_stepped_ = false;
  int64_t early_bytes_ = 0;
  std::vector<size_t> early_order_;  // of StartEarly, since the last Step
  std::atomic<int64_t> early_units_{0};
};

}  // namespace tessera
#endif  // OPTIM_SHARDED_OPTIMIZER_H_
