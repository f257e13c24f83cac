#include "verify/oracle_step.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "base/torch/step_arithmetic.h"
#include "verify/factored/oracle_adafactor.h"
#include "verify/oracle_directed_formulas.h"
#include "verify/oracle_formulas.h"
#include "verify/oracle_norm.h"
#include "verify/oracle_rounding.h"

namespace tessera {
namespace {

using oracle::OneNan;
using oracle::RandomOf;
using oracle::RoundedRandomly;
using oracle::RoundedRandomlyToHalf;
using oracle::SeedOfStep;

// ---- tensors

// In order of indices on the CPU as `dtype`; written back by Put.
class Row {
 public:
  Row(const at::Tensor& tensor, at::ScalarType dtype)
      : original_(tensor), row_(tensor.to(at::kCPU).to(dtype).contiguous()) {}
  template <typename T>
  T* data() const {
    return row_.mutable_data_ptr<T>();
  }
  void Put() const {
    if (!row_.is_same(original_)) original_.copy_(row_);
  }

 private:
  at::Tensor original_, row_;
};

// Work is what one parameter's step reads.
struct Work {
  const at::Tensor& master;
  const std::vector<at::Tensor>& states;
  const at::Tensor& gradient;
  int64_t step;
  const OracleStepOptions& options;
  const OracleRandom& random;
};

template <typename T>
void RoundStates(const Work& w, uint64_t seed, int64_t number, T* state) {
  const uint32_t random = RandomOf(seed, number);
  const uint32_t bits[] = {random & 0xffff, random >> 16,
                           (random >> 8) & 0xffff};
  for (size_t s = 0; s < w.states.size(); ++s) {
    state[s] = RoundedRandomly(state[s], bits[s]);
  }
}

template <typename T, typename Of>
void StepElements(const Work& w) {
  const at::ScalarType dtype = w.master.scalar_type();
  const Row master(w.master, dtype), gradient(w.gradient, dtype);
  std::vector<Row> states;
  for (const at::Tensor& s : w.states) states.emplace_back(s, dtype);
  std::optional<Row> numbers;
  if (w.random.numbers.defined()) {
    numbers.emplace(w.random.numbers, at::kLong);
  }
  const bool narrow = w.options.bf16_states && dtype == at::kFloat;
  const uint64_t seed = SeedOfStep(w.random.parameter, w.step);
  const typename Of::template Formula<T> formula(w.options,
                                                 static_cast<double>(w.step));
  for (int64_t i = 0; i < w.master.numel(); ++i) {
    T g = gradient.data<T>()[i];
    if (w.options.maximize) g = -g;
    T state[3] = {};
    for (size_t s = 0; s < states.size(); ++s) {
      state[s] = states[s].data<T>()[i];
    }
    formula.Step(g, master.data<T>() + i, state);
    if (narrow) {
      const int64_t number = numbers ? numbers->data<int64_t>()[i] : i;
      RoundStates(w, seed, number, state);
    }
    for (size_t s = 0; s < states.size(); ++s) {
      states[s].data<T>()[i] = state[s];
    }
  }
  master.Put();
  for (const Row& s : states) s.Put();
}

template <typename Of>
void StepOfType(const Work& w) {
  if (w.master.scalar_type() == at::kDouble) {
    return StepElements<double, Of>(w);
  }
  TORCH_CHECK(w.master.scalar_type() == at::kFloat, "no masters of ",
              w.master.scalar_type());
  StepElements<float, Of>(w);
}

// torch::optim::AdamW itself, of a parameter with this state.
void TorchOptimStep(const Work& w) {
  const OracleStepOptions& o = w.options;
  at::Tensor parameter = w.master.detach().clone();
  parameter.mutable_grad() = w.gradient;
  torch::optim::AdamW optimizer({parameter}, torch::optim::AdamWOptions(o.lr)
                                                 .betas({o.beta1, o.beta2})
                                                 .eps(o.eps)
                                                 .weight_decay(o.weight_decay));
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(w.step - 1);
  state->exp_avg(w.states[0]);
  state->exp_avg_sq(w.states[1]);
  optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  optimizer.step();
  w.master.copy_(parameter);
}

void FusedAdamWStep(const Work& w) {
  const OracleStepOptions& o = w.options;
  std::vector<at::Tensor> largest;
  if (o.amsgrad) largest.push_back(w.states[2]);
  at::_fused_adamw_(
      {w.master}, {w.gradient}, {w.states[0]}, {w.states[1]}, largest,
      {torch::full({}, static_cast<double>(w.step),
                   at::TensorOptions(w.master.device()))},
      o.lr, o.beta1, o.beta2, o.weight_decay, o.eps, o.amsgrad, o.maximize);
}

// ---- of whole parameters

// master = fma(-rate, direction, master * kept)
template <typename T>
void DescendAs(const at::Tensor& master, const at::Tensor& direction,
               double rate, double kept) {
  const Row to(master, master.scalar_type());
  const Row from(direction, master.scalar_type());
  const auto minus_rate = static_cast<T>(-rate);
  for (int64_t i = 0; i < master.numel(); ++i) {
    T& x = to.data<T>()[i];
    const T decayed = x * static_cast<T>(kept);
    x = OneNan(std::fma(minus_rate, from.data<T>()[i], decayed));
  }
  to.Put();
}
void Descend(const at::Tensor& master, const at::Tensor& direction, double rate,
             double kept) {
  if (master.scalar_type() == at::kDouble) {
    return DescendAs<double>(master, direction, rate, kept);
  }
  DescendAs<float>(master, direction, rate, kept);
}

// What a formula puts in the place of a master.
template <typename Of>
at::Tensor DirectionOf(const Work& w) {
  at::Tensor direction = w.master.clone();
  StepOfType<Of>(
      {direction, w.states, w.gradient, w.step, w.options, w.random});
  return direction;
}

double NormOf(const at::Tensor& t, const OraclePlace& place) {
  PlacedGradient placed;
  placed.gradient = t;
  placed.strides = place.strides.empty() ? t.strides().vec() : place.strides;
  placed.offset = place.offset;
  return OracleNorm({placed}, /*p=*/2);
}

void LambStep(const Work& w, const OraclePlace& place) {
  const OracleStepOptions& o = w.options;
  const at::Tensor direction = DirectionOf<oracle::Of<oracle::Lamb>>(w);
  const double masters = NormOf(w.master, place);
  const double directions = NormOf(direction, place);
  double ratio = 1;
  if (masters > 0 && directions > 0) {
    ratio = masters / directions;
    if (ratio < o.min_coeff) ratio = o.min_coeff;
    if (ratio > o.max_coeff) ratio = o.max_coeff;
  }
  Descend(w.master, direction, o.lr * ratio, /*kept=*/1);
}

void AdafactorStep(const Work& w, const OraclePlace& place) {
  const OracleStepOptions& o = w.options;
  if (w.master.numel() == 0) return;
  const at::Tensor direction = OracleAdafactorDirection(
      w.states, w.gradient, w.step, {o.beta2_decay, o.eps, o.maximize});
  const double root = std::sqrt(static_cast<double>(w.master.numel()));
  double size = NormOf(w.master, place) / root;
  if (!(size > o.eps2)) size = o.eps2;
  double excess = NormOf(direction, place) / (root * o.d);
  if (!(excess > 1)) excess = 1;
  const double rate =
      std::min(o.lr, 1 / std::sqrt(static_cast<double>(w.step)));
  const double kept = o.weight_decay == 0 ? 1 : 1 - o.lr * o.weight_decay;
  Descend(w.master, direction, rate * (size / excess), kept);
}

// Whether oneDNN multiplies such numbers on this processor: the rest libtorch
// does in plain loops, so float32 does it, rounded each time.
bool Multiplies(at::ScalarType dtype) {
  const char* const name = dtype == at::kHalf
                               ? "mkldnn::_is_mkldnn_fp16_supported"
                               : "mkldnn::_is_mkldnn_bf16_supported";
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found.has_value() && found->typed<bool()>().call();
}

// Newton-Schulz in 16 bits: X is [n, m], n at most m.
at::Tensor Iterated(at::Tensor x, const OracleStepOptions& o) {
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
  const at::ScalarType dtype = x.scalar_type();
  const bool wide = x.is_cpu() && !Multiplies(dtype);
  const auto done = [&](const at::Tensor& y) {
    return wide ? y.to(dtype).to(at::kFloat) : y;
  };
  const auto plus = [&](const at::Tensor& y, double times, const at::Tensor& z,
                        double product) {  // times y + product z y
    return done(torch::addmm(y, z, y, times, product));
  };
  const bool gram = o.ns_gram && x.size(0) < x.size(1);
  at::Tensor q, r;  // q undefined: the identity
  x = done(x);
  for (int64_t i = 0; i < o.ns_steps; ++i) {
    if (!gram) {
      const at::Tensor product = done(torch::mm(x, x.t()));
      x = plus(x, a, plus(product, b, product, c), 1);
      continue;
    }
    if (i == 2) {  // begun anew
      x = done(torch::mm(q, x));
      q = at::Tensor();
    }
    if (i == 0 || i == 2) r = done(torch::mm(x, x.t()));
    const at::Tensor z = plus(r, b, r, c);
    if (q.defined()) {
      q = plus(q, a, z, 1);
    } else {
      q = z.clone();
      q.diagonal().add_(a);
      q = done(q);
    }
    r = plus(plus(r, a, z, 1), a, z, 1);
  }
  return q.defined() ? done(torch::mm(q, x)) : x;
}

void MuonStep(const Work& w, const OraclePlace&) {
  const OracleStepOptions& o = w.options;
  const at::Tensor direction = DirectionOf<oracle::Of<oracle::Muon>>(w);
  const int64_t rows = direction.size(0);
  const int64_t columns = direction.numel() / rows;
  at::Tensor x = direction.to(o.ns_gram ? at::kFloat : at::kBFloat16)
                     .reshape({rows, columns});
  if (rows > columns) x = x.t();
  x = x / x.norm().clamp_min(1e-7);
  if (o.ns_gram) x = x.to(at::kHalf);
  x = Iterated(x, o);
  if (rows > columns) x = x.t();
  const double tall = static_cast<double>(rows) / static_cast<double>(columns);
  const double scale =
      o.match_rms_adamw
          ? 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)))
          : std::sqrt(tall > 1 ? tall : 1.0);
  const double kept = o.weight_decay == 0 ? 1 : 1 - o.lr * o.weight_decay;
  // Adding zero leaves only the positive zero.
  Descend(w.master, x.add(0).view(direction.sizes()), o.lr * scale, kept);
}

struct WholeStep {
  const char* algorithm;
  int states;
  void (*step)(const Work& w, const OraclePlace& place);
};
constexpr WholeStep kWholeSteps[] = {{"Lamb", 2, LambStep},
                                     {"Muon", 1, MuonStep},
                                     {"Adafactor", 2, AdafactorStep}};

const WholeStep* FindWholeStep(const std::string& algorithm) {
  for (const WholeStep& whole : kWholeSteps) {
    if (algorithm == whole.algorithm) return &whole;
  }
  return nullptr;
}

int StateCount(const OracleStepOptions& o) {
  if (const WholeStep* const whole = FindWholeStep(o.algorithm)) {
    return whole->states;
  }
  int count = 0;
  TORCH_CHECK(oracle::VisitFormula(
                  o.algorithm,
                  [&](auto of) {
                    using F = typename decltype(of)::template Formula<double>;
                    count = F::States(o);
                  }),
              "no such optimizer: ", o.algorithm);
  return count;
}

}  // namespace

void OracleRoundMaster(const at::Tensor& master, at::ScalarType dtype,
                       int64_t step, const OracleRandom& random) {
  const Row row(master, at::kFloat);
  std::optional<Row> numbers;
  if (random.numbers.defined()) numbers.emplace(random.numbers, at::kLong);
  const uint64_t seed =
      SeedOfStep(random.parameter, step) ^ 0xd1b54a32d192ed03u;
  for (int64_t i = 0; i < master.numel(); ++i) {
    float& x = row.data<float>()[i];
    const uint32_t bits =
        RandomOf(seed, numbers ? numbers->data<int64_t>()[i] : i);
    x = dtype == at::kHalf ? RoundedRandomlyToHalf(x, bits)
                           : RoundedRandomly(x, bits & 0xffff);
  }
  row.Put();
}

at::Tensor OracleRoundTiesAway(const at::Tensor& master) {
  const at::Tensor rounded = master.to(at::kCPU, /*non_blocking=*/false,
                                       /*copy=*/true);
  const Row row(rounded, at::kFloat);
  for (int64_t i = 0; i < master.numel(); ++i) {
    row.data<float>()[i] = oracle::RoundedTiesAway(row.data<float>()[i]);
  }
  row.Put();
  const at::Tensor upper = rounded.view(at::kInt).bitwise_right_shift(16);
  return upper.to(at::kShort).view(at::kBFloat16);  // copy_ would change a NaN
}

bool OracleKnows(const std::string& algorithm) {
  return FindWholeStep(algorithm) != nullptr ||
         oracle::VisitFormula(algorithm, [](auto) {});
}

bool IsPlainAdamW(const OracleStepOptions& o) {
  return o.algorithm == "AdamW" && !o.amsgrad && !o.maximize &&
         o.bias_correction;
}

bool OracleCallsFusedAdamW(c10::DeviceType device, at::ScalarType masters,
                           const OracleStepOptions& options, bool elementwise) {
  if (!IsPlainAdamW(options)) return false;
  if (masters != at::kFloat) return !elementwise;
  return !options.bf16_states &&
         !StepsByFormula(device, masters, /*plain_adamw=*/true);
}

std::vector<at::Tensor> OracleStates(const at::Tensor& master,
                                     const OracleStepOptions& options) {
  if (options.algorithm == "Adafactor") {
    return OracleAdafactorStates(master);
  }
  const bool narrow = options.bf16_states && master.scalar_type() == at::kFloat;
  std::vector<at::Tensor> states;
  for (int s = 0; s < StateCount(options); ++s) {
    states.push_back(torch::zeros_like(
        master,
        master.options().dtype(narrow ? at::kBFloat16 : master.scalar_type())));
  }
  return states;
}

void OracleStep(const at::Tensor& master, const std::vector<at::Tensor>& states,
                const at::Tensor& gradient, int64_t step,
                const OracleStepOptions& options, const OracleRandom& random,
                bool elementwise, const OraclePlace& place) {
  torch::NoGradGuard no_grad;
  const Work w = {master, states, gradient, step, options, random};
  if (options.libtorch_exact) return TorchOptimStep(w);
  if (options.libtorch_fused) return FusedAdamWStep(w);
  if (OracleCallsFusedAdamW(master.device().type(), master.scalar_type(),
                            options, elementwise)) {
    return FusedAdamWStep(w);
  }
  if (const WholeStep* const whole = FindWholeStep(options.algorithm)) {
    return whole->step(w, place);
  }
  TORCH_CHECK(
      oracle::VisitFormula(options.algorithm,
                           [&](auto of) { StepOfType<decltype(of)>(w); }),
      "no such optimizer: ", options.algorithm);
}

}  // namespace tessera
