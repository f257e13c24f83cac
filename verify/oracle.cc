#include "verify/oracle.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "verify/oracle_adamw.h"
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

// Parameters of `module` that have elements, each once.
std::vector<std::pair<std::string, at::Tensor>> DistinctParameters(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> distinct;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& t = entry.value();
    if (t.numel() == 0) continue;
    if (std::any_of(distinct.begin(), distinct.end(),
                    [&](const auto& p) { return p.second.is_same(t); })) {
      continue;
    }
    distinct.emplace_back(entry.key(), t);
  }
  return distinct;
}

bool Is16Bit(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

at::Tensor Reals(const at::Tensor& t) {
  return t.is_complex() ? at::view_as_real(t.resolve_conj()) : t;
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

bool IsNorm(torch::nn::Module& module) {
  namespace nn = torch::nn;
  return module.as<nn::LayerNorm>() != nullptr ||
         module.as<nn::GroupNorm>() != nullptr ||
         module.as<nn::BatchNorm1d>() != nullptr ||
         module.as<nn::BatchNorm2d>() != nullptr ||
         module.as<nn::BatchNorm3d>() != nullptr ||
         module.as<nn::InstanceNorm1d>() != nullptr ||
         module.as<nn::InstanceNorm2d>() != nullptr ||
         module.as<nn::InstanceNorm3d>() != nullptr;
}

// The tensor stays the one it is and, in its storage, where it is.
void Convert(at::Tensor* t, at::ScalarType dtype) {
  if (!t->defined() || !t->is_floating_point()) return;
  if (t->scalar_type() == dtype) return;
  const auto numel =
      static_cast<int64_t>(t->storage().nbytes() / t->element_size());
  at::Tensor converted =
      torch::zeros({numel}, t->options().dtype(dtype).requires_grad(false))
          .as_strided(t->sizes(), t->strides(), t->storage_offset());
  converted.copy_(*t);
  t->set_data(converted);
}

void ConvertModule(torch::nn::Module& module, const OracleOptions& options) {
  torch::NoGradGuard no_grad;
  for (const auto& m : module.modules()) {
    if (options.dtype && !(options.keep_norms && IsNorm(*m))) {
      for (at::Tensor& p : m->parameters(/*recurse=*/false)) {
        Convert(&p, *options.dtype);
      }
    }
    if (!options.buffer_dtype) continue;
    for (at::Tensor& b : m->buffers(/*recurse=*/false)) {
      Convert(&b, *options.buffer_dtype);
    }
  }
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
  at::Tensor rounding;               // of it
  at::Tensor master, exp_avg, exp_avg_sq;
  int64_t steps = 0;
};

Oracle::Oracle(const MakeModule& make_module, OracleOptions options)
    : options_(std::move(options)),
      lr_(options_.lr),
      scale_(ScalingOf(options_)) {
  TORCH_CHECK(options_.predivide == 1 || !(options_.sum || options_.weight),
              "predivide is of means");
  at::set_num_threads(1);
  KeepGenerator keep(at::kCPU);
  KeepGenerator keep_device(options_.device);
  for (int r = 0; r < options_.world_size; ++r) {
    torch::manual_seed(options_.model_seed);
    Rank rank;
    rank.module = make_module();
    torch::manual_seed(options_.rank_seed + static_cast<uint64_t>(r));
    rank.generator_state = DefaultGenerator(options_.device).get_state();
    if (r == 0) AddParameters(*rank.module);
    ConvertModule(*rank.module, options_);
    const auto replicas = DistinctParameters(*rank.module);
    for (size_t i = 0; i < replicas.size(); ++i) {
      parameters_[i].replicas.push_back(replicas[i].second);
    }
    ranks_.push_back(std::move(rank));
  }
}

Oracle::~Oracle() = default;

void Oracle::AddParameters(const torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (const auto& [name, t] : DistinctParameters(module)) {
    Parameter p;
    p.name = name;
    p.complex = t.is_complex();
    const at::Tensor reals = Reals(t.detach());
    p.place.strides = reals.strides().vec();
    p.place.offset = reals.storage_offset();
    p.master = reals.clone();
    if (Is16Bit(t.scalar_type())) p.master = p.master.to(at::kFloat);
    p.exp_avg = torch::zeros_like(p.master);
    p.exp_avg_sq = torch::zeros_like(p.master);
    p.waiting.resize(static_cast<size_t>(options_.world_size));
    parameters_.push_back(std::move(p));
  }
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

void Oracle::TakeGradients(int r, double weight) {
  torch::NoGradGuard no_grad;
  for (Parameter& p : parameters_) {
    at::Tensor& grad = p.replicas[r].mutable_grad();
    if (!grad.defined()) continue;
    at::Tensor mine = torch::empty_like(p.master).copy_(Reals(grad.to_dense()));
    if (weight == 0) mine.zero_();
    at::Tensor& waiting = p.waiting[r];
    waiting = waiting.defined() ? waiting + mine : mine;
    grad.reset();
  }
}

void Oracle::Reduce(Parameter* p) const {
  torch::NoGradGuard no_grad;
  if (std::none_of(p->waiting.begin(), p->waiting.end(),
                   [](const at::Tensor& t) { return t.defined(); })) {
    return;
  }
  const at::ScalarType own = c10::toRealValueType(p->replicas[0].scalar_type());
  const bool chosen = !p->complex && (own == at::kFloat || Is16Bit(own));
  const at::ScalarType dtype =
      chosen ? options_.reduce_dtype.value_or(own) : own;
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
  p->gradient = p->gradient.defined() ? p->gradient + mean : mean;
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

double Oracle::Norm() const {
  std::vector<PlacedGradient> gradients;
  for (const Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    gradients.push_back(p.place);
    gradients.back().gradient = p.gradient;
  }
  return OracleNorm(gradients, options_.norm_p);
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
  const OracleAdamWOptions adamw = {
      lr_,          options_.beta1,        options_.beta2,
      options_.eps, options_.weight_decay, options_.libtorch_exact};
  for (Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    OracleAdamW(p.master, p.exp_avg, p.exp_avg_sq,
                factor == 1 ? p.gradient : p.gradient.mul(factor), ++p.steps,
                adamw);
    for (at::Tensor& replica : p.replicas) Reals(replica).copy_(p.master);
  }
}

std::vector<std::vector<at::Tensor>> Oracle::TrainStep(const Loss& loss) {
  KeepGenerator keep(options_.device);
  for (Parameter& p : parameters_) {
    p.gradient.reset();
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
  outcome_.norm = Norm() * inverse;
  outcome_.skipped = (options_.skip_overflows || options_.loss_scaling) &&
                     !GradientsAreFinite();
  scale_.Update(outcome_.skipped);
  if (outcome_.skipped) return losses;
  double clipping = 1;
  if (options_.max_norm > 0 && outcome_.norm + 1e-6 > options_.max_norm) {
    clipping = options_.max_norm / (outcome_.norm + 1e-6);
  }
  StepOptimizer(inverse * clipping);
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

torch::nn::Module& Oracle::module(int rank) const {
  return *ranks_[rank].module;
}

at::Tensor Oracle::generator_state(int rank) const {
  return ranks_[rank].generator_state;
}

}  // namespace tessera
