#include "optim/unit_step.h"

#include <algorithm>
#include <cmath>

#include "ATen/OpMathType.h"
#include "ATen/Parallel.h"
#include "ATen/TensorIterator.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "c10/core/DeviceGuard.h"
#include "optim/device_kernels.h"
#include "sharding/layout/flat_buffer.h"

namespace tessera {
namespace {

// Elements that vectorised kernels may treat as one group.
constexpr int64_t kGroup = 64;
static_assert(kGroup == kBlock8Elements);

// What libtorch's kernel works on: lists of equal length.
struct Lists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
  std::vector<at::Tensor> averages;  // none, or of each
};

// torch::optim::AdamW::step, operator by operator.
void StepAsTorchOptim(const Lists& lists, const std::vector<int64_t>& steps,
                      const OptimizerOptions& o) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const at::Tensor& param = lists.params[i];
    const at::Tensor& grad = lists.grads[i];
    const auto step = static_cast<double>(steps[i]);
    if (o.weight_decay != 0) param.mul_(1 - o.lr * o.weight_decay);
    lists.exp_avgs[i].mul_(o.beta1).add_(grad, 1 - o.beta1);
    lists.exp_avg_sqs[i].mul_(o.beta2).addcmul_(grad, grad, 1 - o.beta2);
    const double correction1 = 1 - std::pow(o.beta1, step);
    const double correction2 = 1 - std::pow(o.beta2, step);
    const at::Tensor denominator =
        lists.exp_avg_sqs[i].sqrt().div(std::sqrt(correction2)).add_(o.eps);
    param.addcdiv_(lists.exp_avgs[i], denominator, -(o.lr / correction1));
  }
}

// A segment that does not start at a group of its parameter (possible only for
// parameters that lie unaligned in a storage they share) is worked on in copies
// that do, so that the kernel groups its elements as on the whole parameter.
struct Realigned {
  at::Tensor original, copy;
  int64_t offset;
};

at::Tensor Realign(const at::Tensor& segment, Range in_parameter,
                   int64_t param_numel, std::vector<Realigned>* undo) {
  const int64_t from = in_parameter.begin / kGroup * kGroup;
  const int64_t to =
      std::min((in_parameter.end + kGroup - 1) / kGroup * kGroup, param_numel);
  at::Tensor copy = at::zeros({to - from}, segment.options());
  const int64_t offset = in_parameter.begin - from;
  copy.narrow(0, offset, in_parameter.numel()).copy_(segment);
  undo->push_back({segment, copy, offset});
  return copy;
}

// AdamW of float64 is libtorch's, with its bits, if its kernel does it for all
// groups.
bool IsForKernel(const FlatParameter& flat,
                 const std::vector<OptimizerOptions>& groups) {
  const at::Device device = flat.update_device();
  if (groups[0].libtorch_exact) return false;
  if (flat.master_dtype() != at::kFloat && IsPlainAdamW(groups)) return false;
  return device.is_cpu() || DeviceKernelsOf(device.type()) != nullptr;
}

// What the tensors hold now, to be put back if the device skips the step.
class Undoable {
 public:
  explicit Undoable(const GradientFactor& factor) : factor_(factor) {}
  void Keep(const std::vector<at::Tensor>& tensors) {
    if (!factor_.may_skip) return;
    for (const at::Tensor& t : tensors) kept_.emplace_back(t, t.clone());
  }
  void UndoIfSkipped() const {
    if (kept_.empty()) return;
    const at::Tensor skipped = factor_.scalars.select(0, kSkip).ne(0);
    for (const auto& [t, before] : kept_) {
      t.copy_(at::where(skipped, before, t));
    }
  }

 private:
  const GradientFactor& factor_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // it, and its values
};

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
    default:
      return NumberType::kNone;
  }
}

// All of a unit's owned elements. A working copy of another type than the
// kernel's stays to be written.
StepRange RangeOf(Formula formula, const StepTensors& tensors) {
  StepRange range;
  range.master = tensors.masters.mutable_data_ptr();
  range.master_type = NumberTypeOf(tensors.masters.scalar_type());
  range.state_type = range.master_type;
  const auto count = static_cast<size_t>(StatesOf(formula).count);
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
  if (!tensors.working.defined() || range.master_type != NumberType::kFloat32) {
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
  const StepCoefficients& coefficients = part.coefficients;
  if (range.numel < at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    return StepElements(formula, range, coefficients);
  }
  const int64_t lead = range.in_block == 0 ? 0 : kGroup - range.in_block;
  if (lead > 0) StepElements(formula, Part(range, 0, lead), coefficients);
  const auto item = static_cast<int64_t>(masters.element_size());
  at::Tensor firsts = masters.slice(0, lead, range.numel, kGroup);
  auto iterator = at::TensorIterator::nullary_op(firsts);
  iterator.for_each(
      [&](char** data, const int64_t*, int64_t blocks) {
        const int64_t begin =
            (data[0] - static_cast<const char*>(range.master)) / item;
        const int64_t end = std::min(begin + blocks * kGroup, range.numel);
        StepElements(formula, Part(range, begin, end), coefficients);
      },
      at::internal::GRAIN_SIZE / kGroup);
}

}  // namespace

// With the same bits wherever the factor is: a tensor of no dimension is
// rounded to the gradient's dtype before it, as a number is.
void Multiply(const at::Tensor& gradient, const GradientFactor& factor) {
  if (factor.scalars.defined()) {
    const at::ScalarType dtype = at::toOpMathType(gradient.scalar_type());
    gradient.mul_(factor.scalars.select(0, kFactor).to(dtype));
  } else if (factor.value != 1) {
    gradient.mul_(factor.value);
  }
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
  return in_parameter.begin % kGroup == 0 &&
         (in_parameter.end % kGroup == 0 || in_parameter.end == param_numel);
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
  return aligned() && next.aligned() && range.begin % kGroup == 0 &&
         range.numel() % kGroup == 0 && Extend(next);
}

// Of several segments in groups the first one's place stands for all: groups
// begin at the same elements in all, and so does the slice.
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
      device_(flat.update_device()),
      phase_(phase),
      first_group_(static_cast<size_t>(
          group_of[static_cast<size_t>(flat.parameters()[0].index)])),
      kernel_(IsForKernel(flat, options)) {
  // Each parameter has random bits of its own.
  const bool merges = options_[first_group_].states != StateType::kBFloat16;
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
                  scales.empty() ? 1 : scales[parameter]};
    const bool extended =
        !runs_.empty() && merges &&
        (kernel_ ? runs_.back().Extend(run) : runs_.back().ExtendInGroups(run));
    if (!extended) runs_.push_back(run);
  }
  steps_all_ = left_out == 0;
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
  Multiply(tensors.gradient, factor_);
  for (size_t group = 0; group < options_.size(); ++group) {
    ApplyLibtorch(static_cast<int>(group), slice, tensors, counts);
  }
  return false;
}

Formula UnitStep::formula() const {
  return phase_ == StepPhase::kDescent ? Formula::kDescent
                                       : FormulaOf(options_[first_group_]);
}

StepCoefficients UnitStep::CoefficientsFor(const Run& run) const {
  const OptimizerOptions& options = options_[static_cast<size_t>(run.group)];
  if (phase_ == StepPhase::kDescent) {
    return DescentOf(options, run.step, run.scale);
  }
  return CoefficientsOf(options, run.step, factor_.value,
                        SeedOf(run.parameter, run.step));
}

// True if the working copy was written, too: that of what was not stepped is
// its masters rounded already.
bool UnitStep::ApplyKernel(Range slice, const StepTensors& tensors) const {
  const StepRange all = RangeOf(formula(), tensors);
  std::vector<StepPart> parts;  // of a device, at once
  for (const Run& whole : runs_) {
    const Run run = whole.In(slice);
    if (run.range.empty()) continue;
    StepPart part;
    part.range = Part(all, run.range.begin, run.range.end);
    part.range.number = run.in_parameter.begin;
    part.coefficients = CoefficientsFor(run);
    if (device_.is_cpu()) {
      StepInThreads(formula(), part, Slice(tensors.masters, run.range));
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
  DeviceKernelsOf(device_.type())->Step(formula(), *parts, factor_.scalars);
  parts->clear();
}

void UnitStep::ApplyLibtorch(int group, Range slice, const StepTensors& tensors,
                             Counts* counts) const {
  const OptimizerOptions& options = options_[static_cast<size_t>(group)];
  Lists lists;
  std::vector<int64_t> steps;
  std::vector<double> weights;  // of averages
  std::vector<Realigned> undo;
  for (const Run& whole : runs_) {
    const Run run = whole.In(slice);
    if (run.range.empty() || run.group != group) continue;
    auto view = [&](const at::Tensor& of) {
      const at::Tensor t = Slice(of, run.range);
      return run.aligned()
                 ? t
                 : Realign(t, run.in_parameter, run.param_numel, &undo);
    };
    lists.params.push_back(view(tensors.masters));
    lists.grads.push_back(view(tensors.gradient));
    lists.exp_avgs.push_back(view(tensors.states[0]));
    lists.exp_avg_sqs.push_back(view(tensors.states[1]));
    if (tensors.states.size() > 2) {
      lists.averages.push_back(view(tensors.states[2]));
      weights.push_back(CoefficientsFor(run).average_weight);
    }
    steps.push_back(run.step);
    at::Tensor& count = (*counts)[run.step];
    if (!count.defined()) {
      count = at::full({}, static_cast<double>(run.step),
                       at::TensorOptions(at::kFloat).device(device_));
    }
    lists.steps.push_back(count);
  }
  if (lists.params.empty()) return;
  Undoable step(factor_);
  step.Keep(lists.params);
  step.Keep(lists.exp_avgs);
  step.Keep(lists.exp_avg_sqs);
  step.Keep(lists.averages);
  if (options.libtorch_exact) {
    StepAsTorchOptim(lists, steps, options);
  } else {
    at::_fused_adamw_(lists.params, lists.grads, lists.exp_avgs,
                      lists.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, lists.steps,
                      options.lr, options.beta1, options.beta2,
                      options.weight_decay, options.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
  for (size_t i = 0; i < lists.averages.size(); ++i) {
    lists.averages[i].lerp_(lists.params[i], weights[i]);
  }
  step.UndoIfSkipped();
  for (auto& r : undo) {
    r.original.copy_(r.copy.narrow(0, r.offset, r.original.numel()));
  }
}

}  // namespace tessera
