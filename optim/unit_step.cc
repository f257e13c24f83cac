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

// What libtorch's kernel works on: lists of equal length.
struct Lists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
};

// torch::optim::AdamW::step, operator by operator.
void StepAsTorchOptim(const Lists& lists, const std::vector<int64_t>& steps,
                      const AdamWOptions& o) {
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

bool IsForKernel(const FlatParameter& flat) {
  const at::Device device = flat.update_device();
  return flat.master_dtype() == at::kFloat &&
         (device.is_cpu() || DeviceKernelsOf(device.type()) != nullptr);
}

// gradient *= factor, with the same bits wherever the factor is: a tensor of no
// dimension is rounded to the gradient's dtype before it, as a number is.
void Multiply(const at::Tensor& gradient, const GradientFactor& factor) {
  if (factor.scalars.defined()) {
    const at::ScalarType dtype = at::toOpMathType(gradient.scalar_type());
    gradient.mul_(factor.scalars.select(0, kFactor).to(dtype));
  } else if (factor.value != 1) {
    gradient.mul_(factor.value);
  }
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

// All of a unit's owned elements. A working copy of another type than the
// kernel's stays to be written.
AdamWRange RangeOf(const at::Tensor& masters, const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq, const at::Tensor& gradient,
                   const at::Tensor& working) {
  AdamWRange range;
  range.master = masters.mutable_data_ptr<float>();
  range.exp_avg = exp_avg.mutable_data_ptr<float>();
  range.exp_avg_sq = exp_avg_sq.mutable_data_ptr<float>();
  range.gradient = gradient.const_data_ptr<float>();
  range.numel = masters.numel();
  if (!working.defined()) return range;
  if (working.scalar_type() == at::kBFloat16) {
    range.working_type = WorkingType::kBFloat16;
  } else if (working.scalar_type() == at::kHalf) {
    range.working_type = WorkingType::kFloat16;
  }
  if (range.working_type != WorkingType::kNone) {
    range.working = working.mutable_data_ptr();
  }
  return range;
}

// In libtorch's threads, which only its own code can use: at::parallel_for is a
// plain loop where it is compiled without OpenMP, as here. `masters` are those
// of `range`.
void UpdateInThreads(const AdamWRange& range, at::Tensor masters,
                     const AdamWCoefficients& coefficients) {
  if (range.numel < at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    return AdamWUpdate(range, coefficients);
  }
  auto iterator = at::TensorIterator::nullary_op(masters);
  iterator.for_each([&](char** data, const int64_t*, int64_t numel) {
    const int64_t begin = reinterpret_cast<float*>(data[0]) - range.master;
    AdamWUpdate(Part(range, begin, begin + numel), coefficients);
  });
}

}  // namespace

bool UnitStep::Run::operator==(const Run& other) const {
  return range == other.range && in_parameter == other.in_parameter &&
         param_numel == other.param_numel && step == other.step;
}

bool UnitStep::Run::aligned() const {
  return in_parameter.begin % kGroup == 0 &&
         (in_parameter.end % kGroup == 0 || in_parameter.end == param_numel);
}

bool UnitStep::Run::Extend(const Run& next, bool in_groups) {
  if (next.range.begin != range.end || next.step != step) return false;
  if (in_groups && (!aligned() || !next.aligned() ||
                    range.begin % kGroup != 0 || range.numel() % kGroup != 0)) {
    return false;
  }
  range.end = next.range.end;
  return true;
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
                   const AdamWOptions& options, GradientFactor factor)
    : options_(options),
      factor_(std::move(factor)),
      device_(flat.update_device()),
      kernel_(IsForKernel(flat) && !options.libtorch_exact) {
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
                  steps[static_cast<size_t>(p.index)] + 1};
    if (runs_.empty() || !runs_.back().Extend(run, !kernel_)) {
      runs_.push_back(run);
    }
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
  ApplyLibtorch(slice, tensors, counts);
  return false;
}

// True if the working copy was written, too: that of what was not stepped is
// its masters rounded already.
bool UnitStep::ApplyKernel(Range slice, const StepTensors& tensors) const {
  const DeviceKernels* const kernels = DeviceKernelsOf(device_.type());
  const c10::DeviceGuard guard(device_);
  AdamWRange all = RangeOf(tensors.masters, tensors.exp_avg, tensors.exp_avg_sq,
                           tensors.gradient, tensors.working);
  if (tensors.new_masters.defined()) {
    all.new_master = tensors.new_masters.mutable_data_ptr<float>();
  }
  for (const Run& whole : runs_) {
    const Range mine = whole.In(slice).range;
    if (mine.empty()) continue;
    const AdamWRange part = Part(all, mine.begin, mine.end);
    const AdamWCoefficients coefficients =
        CoefficientsOf(options_, whole.step, factor_.value);
    if (device_.is_cpu()) {
      UpdateInThreads(part, Slice(tensors.masters, mine), coefficients);
    } else {
      kernels->AdamW(part, coefficients, factor_.scalars);
    }
  }
  return all.working_type != WorkingType::kNone;
}

void UnitStep::ApplyLibtorch(Range slice, const StepTensors& tensors,
                             Counts* counts) const {
  Lists lists;
  std::vector<int64_t> steps;
  std::vector<Realigned> undo;
  for (const Run& whole : runs_) {
    const Run run = whole.In(slice);
    if (run.range.empty()) continue;
    auto view = [&](const at::Tensor& of) {
      const at::Tensor t = Slice(of, run.range);
      return run.aligned()
                 ? t
                 : Realign(t, run.in_parameter, run.param_numel, &undo);
    };
    lists.params.push_back(view(tensors.masters));
    lists.grads.push_back(view(tensors.gradient));
    lists.exp_avgs.push_back(view(tensors.exp_avg));
    lists.exp_avg_sqs.push_back(view(tensors.exp_avg_sq));
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
  if (options_.libtorch_exact) {
    StepAsTorchOptim(lists, steps, options_);
  } else {
    at::_fused_adamw_(lists.params, lists.grads, lists.exp_avgs,
                      lists.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, lists.steps,
                      options_.lr, options_.beta1, options_.beta2,
                      options_.weight_decay, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
  step.UndoIfSkipped();
  for (auto& r : undo) {
    r.original.copy_(r.copy.narrow(0, r.offset, r.original.numel()));
  }
}

}  // namespace tessera
