// Steps by tensor operators on views of what is stepped: libtorch's AdamW, and
// a program's own optimizer.
//
// Vectorised operators may treat the elements of a group of 64 otherwise than
// the rest of a tensor, so views begin at a group of their parameter, and end
// at one or with it: then what they do to an element is what they would do in
// the whole.
#include <algorithm>
#include <cmath>

#include "ATen/OpMathType.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "base/layout/flat_buffer.h"
#include "base/torch_guard.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/step_scalars.h"
#include "optim/unit_step.h"

namespace tessera {
namespace {

// What libtorch's kernel works on: lists of equal length.
struct Lists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
  std::vector<at::Tensor> max_exp_avg_sqs;  // of AMSGrad
  std::vector<at::Tensor> averages;         // none, or of each
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

at::Tensor Realign(const at::Tensor& segment, Range in_parameter, Range groups,
                   std::vector<Realigned>* undo) {
  at::Tensor copy = at::zeros({groups.numel()}, segment.options());
  const int64_t offset = in_parameter.begin - groups.begin;
  copy.narrow(0, offset, in_parameter.numel()).copy_(segment);
  undo->push_back({segment, copy, offset});
  return copy;
}

void PutBack(const std::vector<Realigned>& realigned) {
  for (const Realigned& r : realigned) {
    r.original.copy_(r.copy.narrow(0, r.offset, r.original.numel()));
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

void UnitStep::ApplyOperators(Range slice, const StepTensors& tensors,
                              Counts* counts) const {
  StepTensors wide = tensors;
  wide.gradient = tensors.gradient.to(tensors.masters.scalar_type());
  Multiply(wide.gradient, factor_);
  if (formula_ == Formula::kCustom) return ApplyCustom(slice, wide);
  for (size_t group = 0; group < options_.size(); ++group) {
    ApplyLibtorch(static_cast<int>(group), slice, wide, counts);
  }
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
                 : Realign(t, run.in_parameter, run.in_groups(), &undo);
    };
    lists.params.push_back(view(tensors.masters));
    lists.grads.push_back(view(tensors.gradient));
    lists.exp_avgs.push_back(view(tensors.states[0]));
    lists.exp_avg_sqs.push_back(view(tensors.states[1]));
    if (options.amsgrad) {
      lists.max_exp_avg_sqs.push_back(view(tensors.states[2]));
    }
    if (tensors.states.size() > num_states_) {
      lists.averages.push_back(view(tensors.states[num_states_]));
      weights.push_back(run.coefficients.average_weight);
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
  step.Keep(lists.max_exp_avg_sqs);
  step.Keep(lists.averages);
  if (options.libtorch_exact) {
    StepAsTorchOptim(lists, steps, options);
  } else {
    at::_fused_adamw_(lists.params, lists.grads, lists.exp_avgs,
                      lists.exp_avg_sqs, lists.max_exp_avg_sqs, lists.steps,
                      options.lr, options.beta1, options.beta2,
                      options.weight_decay, options.eps, options.amsgrad,
                      options.maximize);
  }
  for (size_t i = 0; i < lists.averages.size(); ++i) {
    lists.averages[i].lerp_(lists.params[i], weights[i]);
  }
  step.UndoIfSkipped();
  PutBack(undo);
}

// What a device would skip is not asked of a program: StepShards waits to know.
void UnitStep::ApplyCustom(Range slice, const StepTensors& tensors) const {
  for (const Run& whole : runs_) {
    const Run run = whole.In(slice);
    if (run.range.empty()) continue;
    const OptimizerOptions& options = options_[static_cast<size_t>(run.group)];
    const FlatParameter::Parameter& p = flat_->parameters()[run.in_unit];
    std::vector<Realigned> undo;
    const auto view = [&](const at::Tensor& of) {
      const at::Tensor t = Slice(of, run.range);
      return run.aligned()
                 ? t
                 : Realign(t, run.in_parameter, run.in_groups(), &undo);
    };
    const Range elements = run.in_groups();
    CustomStep step = {p.name,
                       p.tensor.sizes(),
                       elements.begin,
                       elements.end,
                       run.group,
                       run.step,
                       options,
                       view(tensors.masters),
                       view(tensors.gradient),
                       {}};
    for (size_t s = 0; s < num_states_; ++s) {
      step.states.push_back(view(tensors.states[s]));
    }
    ThrowIfError(CallCustom(*options.custom, step));
    if (tensors.states.size() > num_states_) {
      view(tensors.states[num_states_])
          .lerp_(step.master, run.coefficients.average_weight);
    }
    PutBack(undo);
  }
}

}  // namespace tessera
