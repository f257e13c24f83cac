#include "optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/OpMathType.h"
#include "ATen/Parallel.h"
#include "ATen/TensorIterator.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/DeviceGuard.h"
#include "optim/device_kernels.h"
#include "sharding/torch/torch_scope.h"

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

// Segments that follow each other without a gap, of equal step counts: what a
// kernel takes at once.
struct Run {
  Range range;         // in the flat buffer
  Range in_parameter;  // of the first segment
  int64_t param_numel;
  int64_t step;

  bool aligned() const {
    return in_parameter.begin % kGroup == 0 &&
           (in_parameter.end % kGroup == 0 || in_parameter.end == param_numel);
  }
  // `in_groups`: only if the kernel's groups are each segment's.
  bool Extend(const Run& next, bool in_groups) {
    if (next.range.begin != range.end || next.step != step) return false;
    if (in_groups &&
        (!aligned() || !next.aligned() || range.numel() % kGroup != 0)) {
      return false;
    }
    range.end = next.range.end;
    return true;
  }
};

std::vector<Run> RunsOf(const FlatParameter& flat, const FlatGradient& gradient,
                        const std::vector<int64_t>& steps, bool in_groups) {
  std::vector<Run> runs;
  for (const auto& segment : flat.segments()) {
    if (!gradient.has_gradient(segment.parameter)) continue;
    const auto& p = flat.parameters()[segment.parameter];
    const Run run{segment.range,
                  {segment.range.begin - p.range.begin,
                   segment.range.end - p.range.begin},
                  p.range.numel(),
                  steps[p.index]};
    if (runs.empty() || !runs.back().Extend(run, in_groups)) {
      runs.push_back(run);
    }
  }
  return runs;
}

bool IsForKernel(const FlatParameter& flat) {
  return flat.master_dtype() == at::kFloat &&
         (flat.device().is_cpu() ||
          DeviceKernelsOf(flat.device().type()) != nullptr);
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

absl::StatusOr<std::unique_ptr<AdamW>> AdamW::Create(
    std::vector<std::shared_ptr<FlatParameter>> flats, AdamWOptions options) {
  auto adamw = std::make_unique<AdamW>();
  adamw->options_ = options;
  adamw->configured_rate_ = options.lr;
  adamw->flats_ = std::move(flats);
  adamw->states_.resize(adamw->flats_.size());
  for (size_t u = 0; u < adamw->flats_.size(); ++u) {
    const FlatParameter& flat = *adamw->flats_[u];
    if (flat.trainable()) TESSERA_RETURN_IF_ERROR(adamw->EnsureState(u));
    adamw->steps_.resize(adamw->steps_.size() + flat.parameters().size());
  }
  return adamw;
}

absl::Status AdamW::EnsureState(size_t u) {
  FlatParameter& flat = *flats_[u];
  if (states_[u].exp_avg_sq.defined()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(flat.MakeMasters());
  for (FlatBuffer* buffer : {&states_[u].exp_avg, &states_[u].exp_avg_sq}) {
    TESSERA_ASSIGN_OR_RETURN(
        *buffer, FlatBuffer::Allocate(flat.owned().numel(), flat.master_dtype(),
                                      flat.device(), MemoryKind::kOptimizer));
  }
  return absl::OkStatus();
}

std::vector<uint8_t> AdamW::has_state() const {
  std::vector<uint8_t> has;
  for (const State& state : states_) has.push_back(state.exp_avg_sq.defined());
  return has;
}

absl::Status AdamW::MatchStates(const std::vector<uint8_t>& has_state) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (has_state[u] != 0) {
      TESSERA_RETURN_IF_ERROR(EnsureState(u));
    } else {
      states_[u] = State();
      flats_[u]->DropMasters();
    }
  }
  return absl::OkStatus();
}

absl::Status AdamW::Prepare(const Gradients& gradients) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients.of(u).owned().defined()) continue;
    TESSERA_RETURN_IF_ERROR(EnsureState(u));
  }
  return absl::OkStatus();
}

absl::Status AdamW::Step(const Gradients& gradients,
                         const GradientFactor& factor, const AfterUnit& after) {
  return CatchTorch("optimizer step", [&]() -> absl::Status {
    TorchScope scope;
    Counts counts;
    counted_.clear();
    for (size_t u = 0; u < flats_.size(); ++u) {
      const FlatGradient& gradient = gradients.of(u);
      if (!gradient.owned().defined()) continue;
      CountStep(*flats_[u], gradient);
      states_[u].written = true;
      bool working_written = false;
      if (IsForKernel(*flats_[u]) && !options_.libtorch_exact) {
        working_written = StepInKernel(u, gradient, factor);
      } else {
        Multiply(gradient.owned(), factor);
        StepInLibtorch(u, gradient, factor, &counts);
      }
      if (after) TESSERA_RETURN_IF_ERROR(after(u, working_written));
    }
    return absl::OkStatus();
  });
}

void AdamW::CountStep(const FlatParameter& flat, const FlatGradient& gradient) {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    if (!gradient.has_gradient(i)) continue;
    counted_.push_back(static_cast<size_t>(flat.parameters()[i].index));
    ++steps_[counted_.back()];
  }
}

void AdamW::Uncount() {
  for (const size_t i : counted_) --steps_[i];
  counted_.clear();
}

// True if the working copy was written, too: that of what was not stepped is
// its masters rounded already.
bool AdamW::StepInKernel(size_t u, const FlatGradient& gradient,
                         const GradientFactor& factor) {
  FlatParameter& flat = *flats_[u];
  const DeviceKernels* const kernels = DeviceKernelsOf(flat.device().type());
  const c10::DeviceGuard guard(flat.device());
  const at::Tensor masters = flat.masters();
  const AdamWRange all =
      RangeOf(masters, states_[u].exp_avg.View(), states_[u].exp_avg_sq.View(),
              gradient.owned(), flat.separate_working());
  for (const Run& run : RunsOf(flat, gradient, steps_, /*in_groups=*/false)) {
    const Range mine = {run.range.begin - flat.owned().begin,
                        run.range.end - flat.owned().begin};
    const AdamWRange part = Part(all, mine.begin, mine.end);
    const AdamWCoefficients coefficients =
        CoefficientsOf(options_, run.step, factor.value);
    if (flat.device().is_cpu()) {
      UpdateInThreads(part, Slice(masters, mine), coefficients);
    } else {
      kernels->AdamW(part, coefficients, factor.scalars);
    }
  }
  return all.working_type != WorkingType::kNone;
}

void AdamW::StepInLibtorch(size_t u, const FlatGradient& gradient,
                           const GradientFactor& factor, Counts* counts) {
  FlatParameter& flat = *flats_[u];
  Lists lists;
  std::vector<int64_t> steps;
  std::vector<Realigned> undo;
  const at::Tensor masters = flat.masters(), owned = gradient.owned();
  for (const Run& run : RunsOf(flat, gradient, steps_, /*in_groups=*/true)) {
    auto view = [&](const at::Tensor& of) {
      const at::Tensor t = Slice(of, {run.range.begin - flat.owned().begin,
                                      run.range.end - flat.owned().begin});
      return run.aligned()
                 ? t
                 : Realign(t, run.in_parameter, run.param_numel, &undo);
    };
    lists.params.push_back(view(masters));
    lists.grads.push_back(view(owned));
    lists.exp_avgs.push_back(view(states_[u].exp_avg.View()));
    lists.exp_avg_sqs.push_back(view(states_[u].exp_avg_sq.View()));
    steps.push_back(run.step);
    at::Tensor& count = (*counts)[run.step];
    if (!count.defined()) {
      count = at::full({}, static_cast<double>(run.step),
                       at::TensorOptions(at::kFloat).device(flat.device()));
    }
    lists.steps.push_back(count);
  }
  if (lists.params.empty()) return;
  Undoable step(factor);
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

int64_t AdamW::resident_bytes() const {
  int64_t bytes = 0;
  for (const auto& s : states_) bytes += s.exp_avg.bytes() * 2;
  return bytes;
}

}  // namespace tessera
