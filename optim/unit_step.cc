#include "optim/unit_step.h"

#include <algorithm>

#include "ATen/Parallel.h"
#include "ATen/TensorIterator.h"
#include "base/layout/flat_buffer.h"
#include "base/torch/step_arithmetic.h"
#include "c10/core/DeviceGuard.h"
#include "offload/remainders.h"
#include "optim/device_kernels.h"

namespace tessera {
namespace {

NumberType NumberTypeOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return NumberType::kFloat32;
    case at::kDouble:
      return NumberType::kFloat64;
    case at::kBFloat16:
      return NumberType::kBFloat16;
    case at::kHalf:
      return NumberType::kFloat16;
    case at::kByte:
      return NumberType::kBlock8;
    case kRemainderDtype:
      return NumberType::kRemainder;
    default:
      return NumberType::kNone;
  }
}

// All of a unit's owned elements; `count`: of the formula's states. A working
// copy of another type than the kernel's stays to be written.
StepRange RangeOf(size_t count, const StepTensors& tensors) {
  StepRange range;
  range.master = tensors.masters.mutable_data_ptr();
  range.master_type = NumberTypeOf(tensors.masters.scalar_type());
  range.state_type = range.master_type == NumberType::kFloat64
                         ? NumberType::kFloat64
                         : NumberType::kFloat32;
  if (tensors.states.size() > count) {
    range.average = tensors.states[count].mutable_data_ptr();
  }
  for (size_t s = 0; s < count; ++s) {
    range.states[s] = tensors.states[s].mutable_data_ptr();
    range.state_type = NumberTypeOf(tensors.states[s].scalar_type());
  }
  range.gradient = tensors.gradient.const_data_ptr();
  range.gradient_type = NumberTypeOf(tensors.gradient.scalar_type());
  range.numel = tensors.masters.numel();
  if (tensors.new_masters.defined()) {
    range.new_master = tensors.new_masters.mutable_data_ptr();
  }
  for (size_t s = 0; s < tensors.new_states.size(); ++s) {
    if (!tensors.new_states[s].defined()) continue;
    range.new_states[s] = tensors.new_states[s].mutable_data_ptr();
  }
  range.past_caches = tensors.past_caches;
  if (!tensors.working.defined() ||
      (range.master_type != NumberType::kFloat32 &&
       range.master_type != NumberType::kRemainder)) {
    return range;
  }
  const NumberType working = NumberTypeOf(tensors.working.scalar_type());
  if (working == NumberType::kBFloat16 || working == NumberType::kFloat16) {
    range.working_type = working;
    range.working = tensors.working.mutable_data_ptr();
  }
  return range;
}

// In libtorch's threads, which only its own code can use: at::parallel_for is a
// plain loop where it is compiled without OpenMP, as here. `masters` are those
// of `range`. States of 8 bits are cut between their blocks alone, so what goes
// through the iterator is the first element of each block.
void StepInThreads(Formula formula, const StepPart& part,
                   const at::Tensor& masters) {
  const StepRange& range = part.range;
  const auto step = [&](int64_t begin, int64_t end) {
    StepElements(formula, Part(range, begin, end), part.coefficients);
  };
  if (range.numel < at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    return step(0, range.numel);
  }
  const int64_t lead = range.in_block == 0 ? 0 : kStepGroup - range.in_block;
  if (lead > 0) step(0, lead);
  const auto item = static_cast<int64_t>(masters.element_size());
  at::Tensor firsts = masters.slice(0, lead, range.numel, kStepGroup);
  auto iterator = at::TensorIterator::nullary_op(firsts);
  iterator.for_each(
      [&](char** data, const int64_t*, int64_t blocks) {
        const int64_t begin =
            (data[0] - static_cast<const char*>(range.master)) / item;
        step(begin, std::min(begin + blocks * kStepGroup, range.numel));
      },
      at::internal::GRAIN_SIZE / kStepGroup);
}

}  // namespace

bool IsForKernel(c10::DeviceType device, at::ScalarType masters,
                 const std::vector<OptimizerOptions>& groups) {
  if (groups[0].libtorch_exact || groups[0].libtorch_fused) return false;
  if (groups[0].custom != nullptr) return false;
  return StepsByFormula(device, masters, IsPlainAdamW(groups));
}

bool IsPlainAdamW(const std::vector<OptimizerOptions>& groups) {
  return std::all_of(groups.begin(), groups.end(),
                     [](const OptimizerOptions& o) {
                       return FormulaOf(o) == Formula::kAdamW &&
                              o.bias_correction && !o.maximize;
                     });
}

bool UnitStep::Run::operator==(const Run& other) const {
  return range == other.range && in_parameter == other.in_parameter &&
         param_numel == other.param_numel && step == other.step &&
         group == other.group && parameter == other.parameter &&
         scale == other.scale;
}

bool UnitStep::Run::aligned() const {
  return in_parameter.begin % kStepGroup == 0 &&
         (in_parameter.end % kStepGroup == 0 ||
          in_parameter.end == param_numel);
}

Range UnitStep::Run::in_groups() const {
  return {
      in_parameter.begin / kStepGroup * kStepGroup,
      std::min((in_parameter.end + kStepGroup - 1) / kStepGroup * kStepGroup,
               param_numel)};
}

bool UnitStep::Run::Extend(const Run& next) {
  if (next.range.begin != range.end || next.step != step ||
      next.group != group || next.scale != scale) {
    return false;
  }
  range.end = next.range.end;
  return true;
}

bool UnitStep::Run::ExtendInGroups(const Run& next) {
  return aligned() && next.aligned() && range.begin % kStepGroup == 0 &&
         range.numel() % kStepGroup == 0 && Extend(next);
}

// Where a run has several segments in groups, the first one's place stands for
// all: groups begin at the same elements in all, and so does the slice.
UnitStep::Run UnitStep::Run::In(Range slice) const {
  const Range part = Intersect(range, slice);
  Run run = *this;
  run.range = {part.begin - slice.begin, part.end - slice.begin};
  const bool one = in_parameter.numel() == range.numel();
  if (!part.empty() && one) {
    run.in_parameter = {in_parameter.begin + part.begin - range.begin,
                        in_parameter.end - (range.end - part.end)};
  }
  return run;
}

UnitStep::UnitStep(const FlatParameter& flat, const HasGradient& has_gradient,
                   const std::vector<int64_t>& steps,
                   const std::vector<OptimizerOptions>& options,
                   const std::vector<int>& group_of, GradientFactor factor,
                   StepPhase phase, const std::vector<double>& scales)
    : options_(options),
      factor_(std::move(factor)),
      flat_(&flat),
      device_(flat.update_device()),
      phase_(phase),
      kernel_(IsForKernel(device_.type(), flat.step_dtype(), options)) {
  // All parameters of the unit have the formula of the first.
  const OptimizerOptions& own = options[static_cast<size_t>(
      group_of[static_cast<size_t>(flat.parameters()[0].index)])];
  const bool descends = phase == StepPhase::kDescent;
  formula_ = descends ? Formula::kDescent : FormulaOf(own);
  num_states_ = static_cast<size_t>(StateCountOf(own));
  // Each parameter has random bits, or a call, of its own.
  const bool merges = own.states == StateType::kFloat32 &&
                      flat.master_dtype() == flat.step_dtype() &&
                      own.custom == nullptr;
  const int64_t first = flat.owned().begin;
  // Elements of storages, parameters' or not, that are not stepped.
  int64_t left_out = 0;
  for (int i = 0; i < flat.layout().num_slots(); ++i) {
    left_out += Intersect(flat.layout().slot(i), flat.owned()).numel();
  }
  for (const auto& segment : flat.segments()) {
    const auto parameter = static_cast<size_t>(segment.parameter);
    if (!has_gradient[parameter]) continue;
    left_out -= segment.range.numel();
    const auto& p = flat.parameters()[parameter];
    const Run run{{segment.range.begin - first, segment.range.end - first},
                  {segment.range.begin - p.range.begin,
                   segment.range.end - p.range.begin},
                  p.range.numel(),
                  steps[static_cast<size_t>(p.index)] + 1,
                  group_of[static_cast<size_t>(p.index)],
                  p.index,
                  parameter,
                  scales.empty() ? 1 : scales[parameter],
                  {}};
    const bool extended =
        !runs_.empty() && merges &&
        (kernel_ ? runs_.back().Extend(run) : runs_.back().ExtendInGroups(run));
    if (!extended) runs_.push_back(run);
  }
  steps_all_ = left_out == 0;
  for (Run& run : runs_) {
    const OptimizerOptions& group = options[static_cast<size_t>(run.group)];
    run.coefficients =
        descends ? DescentOf(group, run.step, run.scale)
                 : CoefficientsOf(group, run.step, /*gradient_factor=*/1,
                                  SeedOf(run.parameter, run.step));
  }
}

bool UnitStep::operator==(const UnitStep& other) const {
  return SameButFactor(other) && factor_.value == other.factor_.value;
}

bool UnitStep::SameButFactor(const UnitStep& other) const {
  return options_ == other.options_ && runs_ == other.runs_;
}

bool UnitStep::Apply(Range slice, const StepTensors& tensors,
                     Counts* counts) const {
  if (kernel_) return ApplyKernel(slice, tensors);
  ApplyOperators(slice, tensors, counts);
  return false;
}

// True if the working copy was written, too: that of what was not stepped is
// its masters rounded already.
bool UnitStep::ApplyKernel(Range slice, const StepTensors& tensors) const {
  const StepRange all =
      RangeOf(phase_ == StepPhase::kDescent ? 0 : num_states_, tensors);
  std::vector<StepPart> parts;  // of a device, at once
  for (const Run& whole : runs_) {
    const Run run = whole.In(slice);
    if (run.range.empty()) continue;
    StepPart part;
    part.range = Part(all, run.range.begin, run.range.end);
    part.range.number = run.in_parameter.begin;
    part.coefficients = run.coefficients;
    part.coefficients.gradient_factor = factor_.value;
    if (device_.is_cpu()) {
      StepInThreads(formula_, part, Slice(tensors.masters, run.range));
      continue;
    }
    // The block may be one that the part before ends in: after that, then.
    if (part.range.in_block != 0) StepOnDevice(&parts);
    parts.push_back(part);
  }
  StepOnDevice(&parts);
  return all.working_type != NumberType::kNone;
}

void UnitStep::StepOnDevice(std::vector<StepPart>* parts) const {
  if (parts->empty()) return;
  const c10::DeviceGuard guard(device_);
  DeviceKernelsOf(device_.type())->Step(formula_, *parts, factor_.scalars);
  parts->clear();
}

}  // namespace tessera
