// Processes the oracle's gradients before its optimizer: sums in the order of
// ranks, means, clipping.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "verify/oracle.h"
#include "verify/oracle_norm.h"
#include "verify/oracle_parameter.h"

namespace tessera {
namespace {

// Sums in their dtype; 16-bit tensors in float32, rounded once.
at::Tensor SumInOrder(const std::vector<at::Tensor>& tensors) {
  const at::ScalarType dtype = tensors[0].scalar_type();
  at::Tensor sum;
  for (const at::Tensor& t : tensors) {
    const at::Tensor term = Is16Bit(dtype) ? t.to(at::kFloat) : t;
    sum = sum.defined() ? sum + term : term;
  }
  return sum.to(dtype);
}

// Divides by a tensor, since GPUs multiply by the reciprocal of a number.
// 16-bit tensors are divided as floats.
at::Tensor Divided(const at::Tensor& t, double divisor) {
  const at::Tensor wide = Is16Bit(t.scalar_type()) ? t.to(at::kFloat) : t;
  return wide.div(torch::full({}, divisor, wide.options())).to(t.dtype());
}

double EpsilonOf(at::ScalarType type) {
  return type == at::kBFloat16 ? 0x1p-7
         : type == at::kHalf   ? 0x1p-10
         : type == at::kDouble ? 0x1p-52
                               : 0x1p-23;
}

}  // namespace

at::ScalarType Oracle::GradientDtypeOf(const Parameter& p) const {
  const at::ScalarType master = p.master.scalar_type();
  return master == at::kFloat && !p.complex
             ? options_.gradient_dtype.value_or(master)
             : master;
}

at::ScalarType Oracle::ReduceDtypeOf(const Parameter& p) const {
  const at::ScalarType own = c10::toRealValueType(p.replicas[0].scalar_type());
  const bool chosen = !p.complex && (own == at::kFloat || Is16Bit(own));
  return chosen ? options_.reduce_dtype.value_or(own) : own;
}

bool Oracle::AnyHalf() const {
  return std::any_of(
      parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
        return p.replicas[0].scalar_type() == at::kHalf ||
               ReduceDtypeOf(p) == at::kHalf || GradientDtypeOf(p) == at::kHalf;
      });
}

void Oracle::ChooseUnit() {
  const int W = options_.world_size;
  unit_ = 1;
  sum_divisor_ = options_.weight ? 1 : W;
  if (!options_.weight || (W > 1 && !options_.half && !AnyHalf())) return;
  double largest = 0;
  for (int i = 0; i < options_.accumulation && largest == 0; ++i) {
    for (int r = 0; r < W; ++r) {
      largest = std::max(largest, options_.weight(r, micro_batches_ + i));
    }
  }
  if (largest == 0) return;
  bool equal = options_.accumulation == 1;
  for (int r = 0; r < W; ++r) {
    equal = equal && options_.weight(r, micro_batches_) == largest;
  }
  if (equal) {
    unit_ = largest;
    sum_divisor_ = W;
    return;
  }
  unit_ = std::exp2(std::ceil(std::log2(largest))) *
          std::exp2(std::ceil(std::log2(options_.accumulation)));
  sum_divisor_ = std::exp2(std::ceil(std::log2(W)));
}

at::Tensor Oracle::Kept(const Parameter& p, const at::Tensor& gradient) const {
  return gradient.to(GradientDtypeOf(p)).to(gradient.scalar_type());
}

void Oracle::TakeGradients(int r, double weight) {
  torch::NoGradGuard no_grad;
  const int senders = options_.sequence_ranks;
  for (Parameter& p : parameters_) {
    TakeEqual(&p, r);
    for (int i = 0; i < senders; ++i) TakeGradient(&p, r * senders + i, weight);
  }
}

void Oracle::TakeGradient(Parameter* p, int sender, double weight) const {
  at::Tensor& grad = p->replicas[sender].mutable_grad();
  if (!grad.defined()) return;
  at::Tensor mine = torch::empty_like(p->master).copy_(Reals(grad.to_dense()));
  if (weight == 0) mine.zero_();
  at::Tensor& waiting = p->waiting[sender];
  waiting = waiting.defined() ? waiting + mine : mine;
  if (options_.accumulate_locally) {
    waiting =
        waiting.to(at::promoteTypes(GradientDtypeOf(*p), ReduceDtypeOf(*p)))
            .to(mine.scalar_type());
  }
  grad.reset();
}

// The parts after the first have the same values of what is whole.
void Oracle::TakeEqual(Parameter* p, int r) const {
  const at::Tensor& first = p->replicas[r].grad();
  for (at::Tensor& copy : p->copies[r]) {
    at::Tensor& other = copy.mutable_grad();
    TORCH_CHECK(
        other.defined() == first.defined() &&
            (!first.defined() ||
             at::allclose(first.to_dense(), other.to_dense(), /*rtol=*/0,
                          /*atol=*/0, /*equal_nan=*/true)),
        "the parts have different gradients of '", p->name, "'");
    other.reset();
  }
}

void Oracle::Reduce(Parameter* p) const {
  torch::NoGradGuard no_grad;
  if (std::none_of(p->waiting.begin(), p->waiting.end(),
                   [](const at::Tensor& t) { return t.defined(); })) {
    return;
  }
  const at::ScalarType dtype = ReduceDtypeOf(*p);
  std::vector<at::Tensor> sends;
  for (at::Tensor& waiting : p->waiting) {
    if (!waiting.defined()) waiting = torch::zeros_like(p->master);
    at::Tensor send = waiting.to(dtype);
    if (options_.predivide != 1) send = Divided(send, options_.predivide);
    sends.push_back(send);
    waiting.reset();
  }
  AddRounding(p, sends);
  const size_t group = options_.shard_group_size > 0
                           ? static_cast<size_t>(options_.shard_group_size)
                           : sends.size();
  std::vector<at::Tensor> sums;  // by group
  for (size_t i = 0; i < sends.size(); i += group) {
    sums.push_back(SumInOrder({sends.begin() + i, sends.begin() + i + group}));
  }
  at::Tensor mean = SumInOrder(sums).to(p->master.scalar_type());
  const double divisor = (options_.sum ? 1 : sum_divisor_) / options_.predivide;
  if (divisor != 1) mean = Divided(mean, divisor);
  p->gradient = Kept(*p, p->gradient.defined() ? p->gradient + mean : mean);
}

void Oracle::AddRounding(Parameter* p,
                         const std::vector<at::Tensor>& sends) const {
  if (!options_.roundings) return;
  const double factor =
      EpsilonOf(sends[0].scalar_type()) /
      ((options_.sum ? 1 : sum_divisor_) / options_.predivide);
  for (const at::Tensor& send : sends) {
    const at::Tensor one = send.abs().to(at::kDouble).mul(factor);
    p->rounding = p->rounding.defined() ? p->rounding + one : one;
  }
}

// Clips before the final division: the ends are rounded as elements are.
void Oracle::ClipValues() {
  const double end = options_.max_value * outcome_.divisor;
  for (Parameter& p : parameters_) {
    p.clipped = p.gradient;
    if (!p.gradient.defined() || options_.max_value <= 0) continue;
    const bool half = GradientDtypeOf(p) == at::kHalf;
    p.clipped =
        Kept(p, OracleClamped(p.gradient, half ? std::min(end, 65504.0) : end));
  }
}

// The last dim of a complex parameter is that of its parts.
void Oracle::ClipRows() {
  for (Parameter& p : parameters_) {
    const double most =
        p.group.has_value()
            ? groups_[*p.group].adaptive.value_or(options_.adaptive)
            : options_.adaptive;
    if (!p.clipped.defined() || most == 0) continue;
    PlacedGradient placed = p.place;
    placed.gradient = p.clipped;
    const bool rows = p.clipped.dim() - (p.complex ? 1 : 0) >= 2;
    p.clipped = Kept(
        p, OracleAdaptivelyClipped(placed, p.master, rows, outcome_.divisor,
                                   most, options_.adaptive_eps));
  }
}

bool Oracle::HasOwnNorm(const Parameter& p) const {
  return p.group.has_value() && groups_[*p.group].max_norm.has_value();
}

double Oracle::Norm(std::optional<size_t> group) const {
  std::vector<PlacedGradient> gradients;
  for (const Parameter& p : parameters_) {
    const bool meant = group.has_value() ? p.group == group : !HasOwnNorm(p);
    if (!p.clipped.defined() || !meant) continue;
    gradients.push_back(p.place);
    gradients.back().gradient = p.clipped;
  }
  return OracleNorm(gradients, options_.norm_p);
}

// Returns the factor for all gradients. Where groups have maxima of their own,
// it multiplies each by its own factor here.
double Oracle::ClipNorms(double inverse) {
  const double of_rest = OracleClipping(outcome_.norm, options_.max_norm);
  bool any = false;
  std::vector<double> of_group;
  for (size_t g = 0; g < groups_.size(); ++g) {
    any = any || groups_[g].max_norm.has_value();
    of_group.push_back(
        groups_[g].max_norm.has_value()
            ? OracleClipping(Norm(g) * inverse, *groups_[g].max_norm)
            : of_rest);
  }
  if (!any) return inverse * of_rest;
  for (Parameter& p : parameters_) {
    const double factor = p.group ? of_group[*p.group] : of_rest;
    if (!p.clipped.defined() || factor == 1) continue;
    p.clipped = Kept(p, p.clipped.mul(factor));
  }
  return inverse;
}

bool Oracle::GradientsAreFinite() const {
  return std::all_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& p) {
                       return !p.gradient.defined() ||
                              at::isfinite(p.gradient).all().item<bool>();
                     });
}

}  // namespace tessera
