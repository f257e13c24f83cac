#include "verify/oracle.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "verify/oracle_module.h"
#include "verify/oracle_norm.h"
#include "verify/plain_casts.h"

namespace tessera {
namespace {

at::Generator DefaultGenerator(at::Device device) {
  return at::globalContext().defaultGenerator(device);
}

// The default generator is what it was again at the end of the scope.
class KeepGenerator {
 public:
  explicit KeepGenerator(at::Device device)
      : generator_(DefaultGenerator(device)), state_(generator_.get_state()) {}
  ~KeepGenerator() { generator_.set_state(state_); }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

LossScaling ScalingOf(const OracleOptions& options) {
  LossScaling none;
  none.scale = 1;
  none.dynamic = false;
  return options.loss_scaling.value_or(none);
}

bool Is16Bit(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

at::Tensor Reals(const at::Tensor& t) {
  return t.is_complex() ? at::view_as_real(t.resolve_conj()) : t;
}

// Of each element, from the first one's place.
at::Tensor PlacesOf(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return at::arange(last + 1, at::kLong).as_strided(t.sizes(), t.strides());
}

// In their dtype; 16-bit ones in float32, rounded once.
at::Tensor SumInOrder(const std::vector<at::Tensor>& tensors) {
  const at::ScalarType dtype = tensors[0].scalar_type();
  at::Tensor sum;
  for (const at::Tensor& t : tensors) {
    const at::Tensor term = Is16Bit(dtype) ? t.to(at::kFloat) : t;
    sum = sum.defined() ? sum + term : term;
  }
  return sum.to(dtype);
}

// By a tensor: of a number GPUs multiply by the reciprocal. 16 bits as floats.
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

struct Oracle::Rank {
  std::shared_ptr<torch::nn::Module> module;
  at::Tensor generator_state;
};

// One parameter on all ranks; all but the replicas real.
struct Oracle::Parameter {
  std::string name;
  bool complex = false;
  PlacedGradient place;              // in its storage at the start
  std::vector<at::Tensor> replicas;  // by rank
  std::vector<at::Tensor> waiting;   // by rank: not yet reduced
  at::Tensor gradient;               // of the step; undefined: skipped
  at::Tensor clipped;                // what the step is made with, of it
  at::Tensor rounding;               // of it
  at::Tensor master;
  std::vector<at::Tensor> states;  // of its optimizer
  int64_t steps = 0;
  std::optional<size_t> group;  // none: of the rest
  OracleRandom random;
};

Oracle::Oracle(const MakeModule& make_module, OracleOptions options)
    : options_(std::move(options)),
      step_options_(options_.optimizer),
      groups_(options_.groups),
      scale_(ScalingOf(options_)) {
  TORCH_CHECK(options_.predivide == 1 || !(options_.sum || options_.weight),
              "predivide is of means");
  step_options_.lr *= options_.rate_factor;
  for (OracleGroup& group : groups_) group.options.lr *= options_.rate_factor;
  at::set_num_threads(1);
  KeepGenerator keep(at::kCPU);
  KeepGenerator keep_device(options_.device);
  for (int r = 0; r < options_.world_size; ++r) {
    torch::manual_seed(options_.model_seed);
    Rank rank;
    rank.module = make_module();
    torch::manual_seed(options_.rank_seed + static_cast<uint64_t>(r));
    rank.generator_state = DefaultGenerator(options_.device).get_state();
    Freeze(*rank.module);
    if (r == 0) AddParameters(*rank.module);
    ConvertModule(*rank.module, options_.dtype, options_.keep_norms,
                  options_.buffer_dtype);
    const auto replicas = DistinctParameters(*rank.module);
    for (size_t i = 0; i < replicas.size(); ++i) {
      parameters_[i].replicas.push_back(replicas[i].second);
    }
    ranks_.push_back(std::move(rank));
  }
}

Oracle::~Oracle() = default;

void Oracle::Freeze(const torch::nn::Module& module) const {
  const auto group_of = OracleGroupsOf(module, groups_);
  for (auto& [name, t] : DistinctParameters(module)) {
    const auto it = group_of.find(t.unsafeGetTensorImpl());
    if (it == group_of.end() || !groups_[it->second].frozen) continue;
    t.requires_grad_(false);
  }
}

void Oracle::AddParameters(const torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  const auto group_of = OracleGroupsOf(module, groups_);
  for (const auto& [name, t] : DistinctParameters(module)) {
    Parameter p;
    p.name = name;
    p.complex = t.is_complex();
    const at::Tensor reals = Reals(t.detach());
    p.place.strides = reals.strides().vec();
    p.place.offset = reals.storage_offset();
    p.master = reals.clone();
    if (Is16Bit(t.scalar_type())) p.master = p.master.to(at::kFloat);
    const auto group = group_of.find(t.unsafeGetTensorImpl());
    if (group != group_of.end()) p.group = group->second;
    p.states = OracleStates(p.master, StepOptionsOf(p));
    p.random.parameter = static_cast<int64_t>(parameters_.size());
    p.random.numbers = PlacesOf(reals);
    p.waiting.resize(static_cast<size_t>(options_.world_size));
    parameters_.push_back(std::move(p));
  }
}

const OracleStepOptions& Oracle::StepOptionsOf(const Parameter& p) const {
  return p.group ? groups_[*p.group].options : step_options_;
}

at::Tensor Oracle::RunRank(const Loss& loss, int r, double scale) {
  Rank& rank = ranks_[r];
  at::Generator generator = DefaultGenerator(options_.device);
  generator.set_state(rank.generator_state);
  std::optional<PlainCasts> casts;
  if (options_.cast_inputs) casts.emplace(Replicas(r));
  at::Tensor value = loss(*rank.module, r, micro_batches_);
  const double weight =
      options_.weight ? options_.weight(r, micro_batches_) : 1;
  total_weight_ += weight;
  if (value.defined()) {
    const double seed =
        options_.weight ? scale * weight : scale / options_.accumulation;
    if (seed == 1) {
      value.backward();
    } else {
      value.backward(torch::full_like(value, seed));
    }
    value = value.detach();
  } else {
    TORCH_CHECK(options_.weight && weight == 0, "no loss, but a weight");
  }
  casts.reset();
  rank.generator_state = generator.get_state();
  TakeGradients(r, weight);
  return value;
}

std::vector<at::Tensor> Oracle::Replicas(int r) const {
  std::vector<at::Tensor> replicas;
  for (const Parameter& p : parameters_) replicas.push_back(p.replicas[r]);
  return replicas;
}

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

at::Tensor Oracle::Kept(const Parameter& p, const at::Tensor& gradient) const {
  return gradient.to(GradientDtypeOf(p)).to(gradient.scalar_type());
}

void Oracle::TakeGradients(int r, double weight) {
  torch::NoGradGuard no_grad;
  for (Parameter& p : parameters_) {
    at::Tensor& grad = p.replicas[r].mutable_grad();
    if (!grad.defined()) continue;
    at::Tensor mine = torch::empty_like(p.master).copy_(Reals(grad.to_dense()));
    if (weight == 0) mine.zero_();
    at::Tensor& waiting = p.waiting[r];
    waiting = waiting.defined() ? waiting + mine : mine;
    if (options_.accumulate_locally) {
      waiting =
          waiting.to(at::promoteTypes(GradientDtypeOf(p), ReduceDtypeOf(p)))
              .to(mine.scalar_type());
    }
    grad.reset();
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
  if (!options_.sum && !options_.weight) {
    mean = Divided(mean, options_.world_size / options_.predivide);
  }
  p->gradient = Kept(*p, p->gradient.defined() ? p->gradient + mean : mean);
}

void Oracle::AddRounding(Parameter* p,
                         const std::vector<at::Tensor>& sends) const {
  if (!options_.roundings) return;
  const bool mean = !options_.sum && !options_.weight;
  const double factor = EpsilonOf(sends[0].scalar_type()) /
                        (mean ? options_.world_size / options_.predivide : 1);
  for (const at::Tensor& send : sends) {
    const at::Tensor one = send.abs().to(at::kDouble).mul(factor);
    p->rounding = p->rounding.defined() ? p->rounding + one : one;
  }
}

// As what is divided at last: the ends are rounded as elements are.
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

// A complex parameter's last dim is that of its parts.
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

// What all are to be multiplied with; where groups have maxima of their own,
// each is multiplied with its factor here.
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

void Oracle::StepOptimizer(double factor) {
  torch::NoGradGuard no_grad;
  // AdamW of float64 is libtorch's if it is no other in any group.
  const bool elementwise =
      !IsPlainAdamW(step_options_) ||
      std::any_of(groups_.begin(), groups_.end(), [](const OracleGroup& group) {
        return !IsPlainAdamW(group.options);
      });
  for (Parameter& p : parameters_) {
    if (!p.clipped.defined()) continue;
    OracleStepOptions options = StepOptionsOf(p);
    options.average_share = averages_.Share(p.group, options);
    OracleStep(p.master, p.states,
               factor == 1 ? p.clipped : p.clipped.mul(factor), ++p.steps,
               options, p.random, elementwise,
               {p.place.strides, p.place.offset});
    for (at::Tensor& replica : p.replicas) Reals(replica).copy_(p.master);
  }
  averages_.EndStep();
}

std::vector<std::vector<at::Tensor>> Oracle::TrainStep(const Loss& loss) {
  KeepGenerator keep(options_.device);
  for (Parameter& p : parameters_) {
    p.gradient.reset();
    p.clipped.reset();
    p.rounding.reset();
  }
  total_weight_ = 0;
  outcome_ = Outcome();
  outcome_.scale = scale_.scale();
  std::vector<std::vector<at::Tensor>> losses(ranks_.size());
  for (int i = 0; i < options_.accumulation; ++i) {
    for (int r = 0; r < options_.world_size; ++r) {
      losses[r].push_back(RunRank(loss, r, outcome_.scale));
    }
    ++micro_batches_;
    if (options_.accumulate_locally && i + 1 < options_.accumulation) continue;
    for (Parameter& p : parameters_) Reduce(&p);
  }
  const double samples = options_.weight ? total_weight_ : 1;
  outcome_.divisor = outcome_.scale * samples;
  const double inverse = 1 / outcome_.divisor;
  ClipValues();
  ClipRows();
  outcome_.norm = Norm(std::nullopt) * inverse;
  outcome_.skipped = (options_.skip_overflows || options_.loss_scaling) &&
                     !GradientsAreFinite();
  scale_.Update(outcome_.skipped);
  if (outcome_.skipped) return losses;
  StepOptimizer(ClipNorms(inverse));
  return losses;
}

const Oracle::Parameter& Oracle::Find(absl::string_view name) const {
  auto it = std::find_if(parameters_.begin(), parameters_.end(),
                         [&](const Parameter& p) { return p.name == name; });
  TORCH_CHECK(it != parameters_.end(), "no parameter ", std::string(name));
  return *it;
}

std::vector<std::string> Oracle::parameter_names() const {
  std::vector<std::string> names;
  for (const Parameter& p : parameters_) names.push_back(p.name);
  return names;
}

at::Tensor Oracle::parameter(absl::string_view name) const {
  return Find(name).replicas[0].detach();
}

at::Tensor Oracle::master(absl::string_view name) const {
  const Parameter& p = Find(name);
  return p.complex ? at::view_as_complex(p.master) : p.master;
}

at::Tensor Oracle::gradient(absl::string_view name) const {
  const Parameter& p = Find(name);
  return p.complex && p.gradient.defined() ? at::view_as_complex(p.gradient)
                                           : p.gradient;
}

at::Tensor Oracle::rounding(absl::string_view name) const {
  const Parameter& p = Find(name);
  return p.complex && p.rounding.defined() ? at::view_as_complex(p.rounding)
                                           : p.rounding;
}

void Oracle::SetMaster(absl::string_view name, const at::Tensor& value) {
  torch::NoGradGuard no_grad;
  const Parameter& p = Find(name);
  p.master.copy_(Reals(value));
  for (const at::Tensor& replica : p.replicas) {
    Reals(replica.detach()).copy_(p.master);
  }
}

void Oracle::SetLearningRate(absl::string_view group, double rate) {
  if (group == "default") {
    step_options_.lr = rate;
    return;
  }
  auto it = std::find_if(groups_.begin(), groups_.end(),
                         [&](const OracleGroup& g) { return g.name == group; });
  TORCH_CHECK(it != groups_.end(), "no group ", std::string(group));
  it->options.lr = rate;
}

torch::nn::Module& Oracle::module(int rank) const {
  return *ranks_[rank].module;
}

at::Tensor Oracle::generator_state(int rank) const {
  return ranks_[rank].generator_state;
}

}  // namespace tessera
