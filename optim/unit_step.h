// UnitStep: the decided step of one unit: its elements and their coefficients.
// It can be applied to all of them at once, or slice by slice as states come
// from a disk, with the same bits: a kernel's groups of elements are where they
// would be on whole parameters.
#ifndef OPTIM_UNIT_STEP_H_
#define OPTIM_UNIT_STEP_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "base/layout/layout.h"
#include "offload/element_format.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/kernels/block8.h"
#include "optim/kernels/element_step.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {

// Elements that vectorised kernels and operators may treat as one group.
inline constexpr int64_t kStepGroup = 64;
static_assert(kStepGroup == kBlock8Elements);

// Whether parameter i of a unit has a gradient.
using HasGradient = std::vector<bool>;

// Whether all groups are stepped with AdamW as libtorch's fused kernel has it.
bool IsPlainAdamW(const std::vector<OptimizerOptions>& groups);

// Whether our kernels step masters with arithmetic of that dtype on `device`,
// for these groups, at least one; else libtorch's operators, or a program's own
// optimizer, do.
bool IsForKernel(c10::DeviceType device, at::ScalarType masters,
                 const std::vector<OptimizerOptions>& groups);

// The factor that gradients are multiplied by.
struct GradientFactor {
  GradientFactor(double value = 1) : value(value) {}  // NOLINT: is a number
  // A factor on the device, FinishNorm's (optim/device_kernels.h); if
  // `may_skip`, the device also decides whether there is a step at all.
  GradientFactor(at::Tensor scalars, bool may_skip)
      : scalars(std::move(scalars)), may_skip(may_skip) {}
  double value = 1;
  at::Tensor scalars;  // undefined: `value` is it
  bool may_skip = false;
};

// Multiplies `gradient` by `factor` in place. LOCAL, ASYNC on devices.
void Multiply(const at::Tensor& gradient, const GradientFactor& factor);

// The tensors of a step: the same elements of each, [n].
struct StepTensors {
  // They have the master dtype, or are remainders beside `working`
  // (offload/remainders.h). REQUIRES, for these: takes_remainders.
  at::Tensor masters;
  // The formula's states, in its order, and the average if there is one, in the
  // masters' dtype. kByte: states of 8 bits (optim/kernels/block8.h).
  std::vector<at::Tensor> states;
  // In the master dtype, or 16 bits beside float32; its values may be changed
  // by the step.
  at::Tensor gradient;
  at::Tensor working;  // undefined where masters are it
  // Where new masters and states are written while the old ones stay; undefined
  // ones: in place. REQUIRES, unless undefined: writes_elsewhere; of states,
  // neither of 8 bits nor the average. For a direction the new masters alone.
  at::Tensor new_masters;
  std::vector<at::Tensor> new_states;  // empty: all in place
  // Whether nobody reads new_masters, new_states and the working copy soon
  // (StepRange::past_caches).
  bool past_caches = false;
};

// Which part of a step is made.
enum class StepPhase : uint8_t {
  kWhole,
  // The direction of a directed step (optim/directed_step.h), into
  // StepTensors::new_masters, which may be the gradient; masters stay.
  kDirection,
  // The descent of a directed step: the gradient is the direction.
  kDescent,
};

class UnitStep {
 public:
  // Decides a step of the parameters with a gradient, on
  // FlatDescription::update_device(). `flat` outlives this. `steps` (before
  // this step) and `group_of` (index in `options`) are by parameter of the
  // model. `scales`: factors of the rate for kDescent, by parameter of the
  // unit.
  UnitStep(const FlatParameter& flat, const HasGradient& has_gradient,
           const std::vector<int64_t>& steps,
           const std::vector<OptimizerOptions>& options,
           const std::vector<int>& group_of, GradientFactor factor,
           StepPhase phase = StepPhase::kWhole,
           const std::vector<double>& scales = {});
  // Whether both do the same to the same unit. REQUIRES: both factors are
  // numbers.
  bool operator==(const UnitStep& other) const;
  // Whether both do the same except for their factors.
  bool SameButFactor(const UnitStep& other) const;

  // Tensors that hold a number of steps, by that number; may be reused for
  // several calls.
  using Counts = absl::flat_hash_map<int64_t, at::Tensor>;
  // Steps the elements of `slice`, which is counted from the first that this
  // rank owns; `tensors` hold these elements. A slice begins at a multiple of
  // 64. Returns true if the working copy was written, too. LOCAL; on devices
  // ASYNC, on the current stream. Throws c10::Error, and what a program's own
  // optimizer says (StatusException).
  bool Apply(Range slice, const StepTensors& tensors, Counts* counts) const;
  StepPhase phase() const { return phase_; }
  // Returns the number of the formula's states, which a direction needs and a
  // descent does not; the unit's average comes after them if there is one.
  size_t num_states() const { return num_states_; }
  // Whether every element of the storages is stepped: none belongs to a
  // parameter without a gradient, or to no parameter.
  bool steps_all() const { return steps_all_; }
  // Whether Apply supports StepTensors::new_masters and new_states; it writes
  // all of them except gaps between storages.
  bool writes_elsewhere() const {
    return kernel_ && steps_all_ && device_.is_cpu();
  }
  // Whether Apply supports remainders as StepTensors::masters; it writes
  // `working`, too.
  bool takes_remainders() const {
    return kernel_ && phase_ != StepPhase::kDirection;
  }
  // Whether Apply leaves StepTensors::gradient unchanged.
  bool keeps_gradient() const { return kernel_ || factor_.value == 1; }
  // Changes the factor of the gradients.
  void SetFactor(double value) { factor_ = value; }
  // REQUIRES: is a number.
  double factor() const { return factor_.value; }

 private:
  // Segments that follow each other without a gap, of one group and with equal
  // step counts: what a kernel takes at once.
  struct Run {
    Range range;         // from the first element that this rank owns
    Range in_parameter;  // of the first segment
    int64_t param_numel;
    int64_t step;
    int group;
    int64_t parameter;  // of the model, the first segment's
    size_t in_unit;     // the same, of the unit
    double scale;
    StepCoefficients coefficients;  // except for the factor of gradients

    bool operator==(const Run& other) const;
    bool aligned() const;
    // The groups of its parameter that it has elements of.
    Range in_groups() const;
    bool Extend(const Run& next);
    // Only if the kernel's groups of elements are each segment's.
    bool ExtendInGroups(const Run& next);
    // The part of it in `slice`, from where that begins; empty if there is
    // none.
    Run In(Range slice) const;
  };
  bool ApplyKernel(Range slice, const StepTensors& tensors) const;
  // Launches the parts and clears `parts`.
  void StepOnDevice(std::vector<StepPart>* parts) const;
  // unit_step_operators.cc
  void ApplyOperators(Range slice, const StepTensors& tensors,
                      Counts* counts) const;
  void ApplyLibtorch(int group, Range slice, const StepTensors& tensors,
                     Counts* counts) const;
  void ApplyCustom(Range slice, const StepTensors& tensors) const;

  std::vector<OptimizerOptions> options_;  // of groups
  GradientFactor factor_;
  const FlatParameter* flat_;
  at::Device device_;
  StepPhase phase_;
  Formula formula_;  // of the phase
  size_t num_states_ = 0;
  bool kernel_ = false;
  bool steps_all_ = false;
  std::vector<Run> runs_;
};

}  // namespace tessera
#endif  // OPTIM_UNIT_STEP_H_
