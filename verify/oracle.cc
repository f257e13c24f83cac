#include "verify/oracle.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "parallel/tensor/placed.h"
#include "verify/oracle_module.h"
#include "verify/oracle_parameter.h"
#include "verify/parts/part_turns.h"
#include "verify/plain/plain_casts.h"

namespace tessera {
namespace {

at::Generator DefaultGenerator(at::Device device) {
  return at::globalContext().defaultGenerator(device);
}

// Restores the default generator at the end of the scope.
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

// Returns the place of each element, relative to the first one's.
at::Tensor PlacesOf(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return at::arange(last + 1, at::kLong).as_strided(t.sizes(), t.strides());
}

}  // namespace

Oracle::Oracle(const MakeModule& make_module, OracleOptions options)
    : options_(std::move(options)),
      step_options_(options_.optimizer),
      groups_(options_.groups),
      scale_(ScalingOf(options_)) {
  step_options_.lr *= options_.rate_factor;
  for (OracleGroup& group : groups_) group.options.lr *= options_.rate_factor;
  at::set_num_threads(1);
  KeepGenerator keep(at::kCPU);
  KeepGenerator keep_device(options_.device);
  const int parts = options_.tensor_ranks * options_.sequence_ranks;
  turns_ =
      std::make_unique<PartTurns>(parts, DefaultGenerator(options_.device));
  for (int r = 0; r < options_.world_size; ++r) {
    Rank rank;
    for (int part = 0; part < parts; ++part) {
      torch::manual_seed(options_.model_seed);
      auto module = make_module();
      torch::manual_seed(options_.rank_seed + static_cast<uint64_t>(r));
      rank.generator_state = DefaultGenerator(options_.device).get_state();
      Freeze(*module);
      if (r == 0) AddParameters(*module, part);
      ConvertModule(*module, options_.dtype, options_.keep_norms,
                    options_.buffer_dtype);
      AddReplicas(*module, part);
      rank.modules.push_back(std::move(module));
    }
    ranks_.push_back(std::move(rank));
  }
  torch::NoGradGuard no_grad;
  for (Parameter& p : parameters_) {
    if (HasNarrowMaster(p)) p.master = p.replicas[0].detach().to(at::kFloat);
    if (RoundsTiesAway(p)) Publish(p);
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

const OracleOptions::Cut* Oracle::CutOf(absl::string_view name) const {
  for (const OracleOptions::Cut& cut : options_.tensor_cuts) {
    if (cut.name == name) return &cut;
  }
  return nullptr;
}

// What each part has whole is added with the first.
void Oracle::AddParameters(const torch::nn::Module& module, int part) {
  torch::NoGradGuard no_grad;
  const auto group_of = OracleGroupsOf(module, groups_);
  int64_t number = -1;
  for (const auto& [name, t] : DistinctParameters(module)) {
    ++number;
    Parameter p;
    p.name = name;
    p.part = part;
    if (const OracleOptions::Cut* const cut = CutOf(name)) {
      p.cut = TensorPlacement::Shard(cut->dim, cut->groups);
    }
    if (part > 0 && !p.cut.has_value()) continue;
    p.complex = t.is_complex();
    const at::Tensor mine = p.cut.has_value()
                                ? SlicePart(t, *p.cut, *turns_->group(part))
                                : t.detach();
    const at::Tensor reals = Reals(mine);
    p.place.strides = reals.strides().vec();
    p.place.offset = reals.storage_offset();
    p.master = reals.clone();
    if (Is16Bit(t.scalar_type())) p.master = p.master.to(at::kFloat);
    const auto group = group_of.find(t.unsafeGetTensorImpl());
    if (group != group_of.end()) p.group = group->second;
    p.states = OracleStates(p.master, StepOptionsOf(p));
    p.random.parameter = number;
    p.random.numbers = PlacesOf(reals);
    p.waiting.resize(static_cast<size_t>(options_.world_size) *
                     static_cast<size_t>(options_.sequence_ranks));
    parameters_.push_back(std::move(p));
  }
}

// Divides the module, too.
void Oracle::AddReplicas(const torch::nn::Module& module, int part) {
  for (const auto& [name, t] : DistinctParameters(module)) {
    const OracleOptions::Cut* const cut = CutOf(name);
    at::Tensor replica = t;
    const auto& group = turns_->group(part);
    const bool sends = options_.sequence_ranks > 1;
    if (sends) {
      replica = t.detach().set_requires_grad(t.requires_grad());
      PlaceInPlace(t, replica, TensorPlacement::Copy(), group);
    } else if (cut != nullptr) {
      const auto placement = TensorPlacement::Shard(cut->dim, cut->groups);
      replica =
          SlicePart(t, placement, *group).set_requires_grad(t.requires_grad());
      PlaceInPlace(t, replica, placement, group);
    }
    for (Parameter& p : parameters_) {
      if (p.name != name || (cut != nullptr && p.part != part)) continue;
      if (part == 0 || cut != nullptr || sends) {
        p.replicas.push_back(replica);
        p.copies.emplace_back();
      } else {
        p.copies.back().push_back(replica);
      }
    }
  }
}

bool Oracle::HasNarrowMaster(const Parameter& p) const {
  return options_.narrow_masters && Is16Bit(p.replicas[0].scalar_type());
}

bool Oracle::RoundsTiesAway(const Parameter& p) const {
  return options_.ties_away && p.master.scalar_type() == at::kFloat &&
         p.replicas[0].scalar_type() == at::kBFloat16;
}

void Oracle::Publish(const Parameter& p) const {
  const at::Tensor values =
      RoundsTiesAway(p) ? OracleRoundTiesAway(p.master) : p.master;
  for (size_t r = 0; r < p.replicas.size(); ++r) {
    Reals(p.replicas[r].detach()).copy_(values);
    for (const at::Tensor& copy : p.copies[r])
      Reals(copy.detach()).copy_(values);
  }
}

const OracleStepOptions& Oracle::StepOptionsOf(const Parameter& p) const {
  return p.group ? groups_[*p.group].options : step_options_;
}

at::Tensor Oracle::RunRank(const Loss& loss, int r, double scale) {
  Rank& rank = ranks_[r];
  at::Generator generator = DefaultGenerator(options_.device);
  generator.set_state(rank.generator_state);
  const double weight =
      options_.weight ? options_.weight(r, micro_batches_) / unit_ : 1;
  total_weight_ += weight;
  std::vector<at::Tensor> values(rank.modules.size());  // by part
  turns_->Run([&](int part) {
    std::optional<PlainCasts> casts;
    if (options_.cast_inputs) casts.emplace(Replicas(r, part));
    at::Tensor& value = values[part];
    value = loss(*rank.modules[part], r, micro_batches_);
    if (!value.defined()) {
      TORCH_CHECK(options_.weight && weight == 0, "no loss, but a weight");
      return;
    }
    const double seed =
        options_.weight ? scale * weight : scale / options_.accumulation;
    if (seed == 1) {
      value.backward();
    } else {
      value.backward(torch::full_like(value, seed));
    }
    value = value.detach();
  });
  rank.generator_state = generator.get_state();
  TakeGradients(r, weight);
  return values[0];
}

std::vector<at::Tensor> Oracle::Replicas(int r, int part) const {
  std::vector<at::Tensor> replicas;
  for (const Parameter& p : parameters_) {
    if (options_.sequence_ranks > 1) {
      replicas.push_back(p.replicas[r * options_.sequence_ranks + part]);
    } else if (p.part == part) {
      replicas.push_back(p.replicas[r]);
    } else if (!p.cut.has_value()) {
      replicas.push_back(p.copies[r][part - 1]);
    }
  }
  return replicas;
}

void Oracle::StepOptimizer(double factor) {
  torch::NoGradGuard no_grad;
  // libtorch's AdamW steps float64 masters only if all groups use plain AdamW.
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
    if (HasNarrowMaster(p)) {
      OracleRoundMaster(p.master, p.replicas[0].scalar_type(), p.steps,
                        p.random);
    }
    Publish(p);
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
  ChooseUnit();
  for (int i = 0; i < options_.accumulation; ++i) {
    for (int r = 0; r < options_.world_size; ++r) {
      losses[r].push_back(RunRank(loss, r, outcome_.scale));
    }
    ++micro_batches_;
    if (options_.accumulate_locally && i + 1 < options_.accumulation) continue;
    for (Parameter& p : parameters_) Reduce(&p);
  }
  const double samples =
      options_.weight
          ? total_weight_ / (options_.sum ? options_.world_size : sum_divisor_)
          : 1;
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
  for (const Parameter& p : parameters_) {
    if (p.part == 0) names.push_back(p.name);
  }
  return names;
}

// Joins what `of` returns for each part, in their order.
at::Tensor Oracle::Joined(
    absl::string_view name,
    const std::function<at::Tensor(const Parameter&)>& of) const {
  const Parameter& first = Find(name);
  if (!first.cut.has_value()) return of(first);
  std::vector<at::Tensor> parts;
  for (const Parameter& p : parameters_) {
    if (p.name == name) parts.push_back(of(p));
  }
  if (!parts[0].defined()) return at::Tensor();
  const auto [kind, dim, groups] = *first.cut;
  for (at::Tensor& part : parts) part = part.unflatten(dim, {groups, -1});
  return at::cat(parts, dim + 1).flatten(dim, dim + 1);
}

at::Tensor Oracle::parameter(absl::string_view name) const {
  return Joined(name,
                [](const Parameter& p) { return p.replicas[0].detach(); });
}

at::Tensor Oracle::master(absl::string_view name) const {
  return Joined(name, [](const Parameter& p) {
    return p.complex ? at::view_as_complex(p.master) : p.master;
  });
}

at::Tensor Oracle::gradient(absl::string_view name) const {
  return Joined(name, [](const Parameter& p) {
    return p.complex && p.gradient.defined() ? at::view_as_complex(p.gradient)
                                             : p.gradient;
  });
}

at::Tensor Oracle::rounding(absl::string_view name) const {
  return Joined(name, [](const Parameter& p) {
    return p.complex && p.rounding.defined() ? at::view_as_complex(p.rounding)
                                             : p.rounding;
  });
}

void Oracle::SetMaster(absl::string_view name, const at::Tensor& value) {
  torch::NoGradGuard no_grad;
  for (const Parameter& p : parameters_) {
    if (p.name != name) continue;
    const at::Tensor mine =
        p.cut.has_value() ? SlicePart(value, *p.cut, *turns_->group(p.part))
                          : value;
    p.master.copy_(Reals(mine));
    Publish(p);
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
  return *ranks_[rank].modules[0];
}

at::Tensor Oracle::generator_state(int rank) const {
  return ranks_[rank].generator_state;
}

}  // namespace tessera
