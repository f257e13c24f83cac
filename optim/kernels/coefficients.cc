// What a formula needs of options and the step's number, in float64.
#include <algorithm>
#include <cmath>

#include "optim/kernels/element_step.h"
#include "optim/kernels/formulas.h"

namespace tessera {
namespace {

void SetAdam(const OptimizerOptions& o, double step, bool l2,
             StepCoefficients* k) {
  using F = AdamFormula<false, false>;  // the same of all four
  const double correction1 =
      o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double correction2 =
      o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  double* const c = k->values;
  c[F::kDecay] = l2 ? o.weight_decay : 1;
  if (!l2 && o.weight_decay != 0) c[F::kDecay] = 1 - o.lr * o.weight_decay;
  c[F::kWeight] = 1 - o.beta1;
  c[F::kBeta2] = o.beta2;
  c[F::kSquareWeight] = 1 - o.beta2;
  c[F::kCorrection] = std::sqrt(correction2);
  c[F::kEps] = o.eps;
  c[F::kMinusStepSize] = -(o.lr / correction1);
  k->variant = !(static_cast<float>(c[F::kWeight]) < 0.5f);
}

void SetSgd(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = SgdFormula<true>;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kKept] = step == 1 ? 0 : o.momentum;
  c[F::kAdded] = step == 1 ? 1 : 1 - o.dampening;
  c[F::kNesterov] = o.momentum;
  k->variant = o.nesterov;
}

void SetAdagrad(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = AdagradFormula;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -(o.lr / (1 + (step - 1) * o.lr_decay));
  c[F::kInitial] = o.initial_accumulator_value;
  c[F::kEps] = o.eps;
}

void SetRmsProp(const OptimizerOptions& o, StepCoefficients* k) {
  using F = RmsPropFormula<true, true>;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kAlpha] = o.alpha;
  c[F::kSquareWeight] = 1 - o.alpha;
  c[F::kEps] = o.eps;
  c[F::kKept] = o.momentum;
}

void SetLion(const OptimizerOptions& o, StepCoefficients* k) {
  using F = LionFormula;
  double* const c = k->values;
  c[F::kDecay] = 1 - o.lr * o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kBeta1] = o.beta1;
  c[F::kWeight1] = 1 - o.beta1;
  c[F::kBeta2] = o.beta2;
  c[F::kWeight2] = 1 - o.beta2;
}

void SetLamb(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = LambFormula;
  SetAdam(o, step, /*l2=*/true, k);  // the same but for the last
  static_assert(static_cast<int>(F::kEps) ==
                    static_cast<int>(AdamFormula<true, false>::kEps),
                "in one order");
  k->values[F::kCorrection1] =
      o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
}

void SetMuon(const OptimizerOptions& o, StepCoefficients* k) {
  using F = MuonFormula;
  k->values[F::kWeight] = 1 - o.momentum;
  k->values[F::kMomentum] = o.momentum;
  k->variant = o.nesterov;
}

void SetScheduleFree(const OptimizerOptions& o, double step,
                     StepCoefficients* k) {
  using F = ScheduleFreeFormula;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kBeta2] = o.beta2;
  c[F::kSquareWeight] = 1 - o.beta2;
  c[F::kCorrection] = std::sqrt(1 - std::pow(o.beta2, step));
  c[F::kEps] = o.eps;
  c[F::kShare] = o.average_share;
  c[F::kMinusRateOfY] = -(o.lr * (1 - o.beta1 * (1 - o.average_share)));
  c[F::kMinusRate] = -o.lr;
  k->variant = step == 1;
}

// The average begins with the first new master.
void SetAverage(const OptimizerOptions& o, int64_t step, StepCoefficients* k) {
  if (o.ema_decay > 0) k->average_weight = step == 1 ? 1 : 1 - o.ema_decay;
}

// As many as the formula has.
StepStates NamesOfStates(Formula formula) {
  switch (formula) {
    case Formula::kAdamW:
    case Formula::kAdam:
    case Formula::kLambDirection:
      return {{{"exp_avg"}, {"exp_avg_sq"}}};
    case Formula::kAdamWAmsGrad:
    case Formula::kAdamAmsGrad:
      return {{{"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq"}}};
    case Formula::kSgdMomentum:
    case Formula::kMuonDirection:
      return {{{"momentum_buffer"}}};
    case Formula::kAdagrad:
      return {{{"sum"}}};
    case Formula::kRmsProp:
      return {{{"square_avg"}}};
    case Formula::kRmsPropMomentum:
      return {{{"square_avg"}, {"momentum_buffer"}}};
    case Formula::kRmsPropCentered:
      return {{{"square_avg"}, {"grad_avg"}}};
    case Formula::kRmsPropCenteredMomentum:
      return {{{"square_avg"}, {"grad_avg"}, {"momentum_buffer"}}};
    case Formula::kLion:
      return {{{"exp_avg"}}};
    case Formula::kScheduleFree:
      return {{{"z"}, {"exp_avg_sq"}}};
    case Formula::kSgd:
    case Formula::kAdafactorDirection:
    case Formula::kDescent:
    case Formula::kCustom:
      return {{}};
  }
}

uint64_t Mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

Formula FormulaOf(const OptimizerOptions& o) {
  switch (o.algorithm) {
    case Algorithm::kAdamW:
      return o.amsgrad ? Formula::kAdamWAmsGrad : Formula::kAdamW;
    case Algorithm::kAdam:
      return o.amsgrad ? Formula::kAdamAmsGrad : Formula::kAdam;
    case Algorithm::kSgd:
      return o.momentum != 0 ? Formula::kSgdMomentum : Formula::kSgd;
    case Algorithm::kAdagrad:
      return Formula::kAdagrad;
    case Algorithm::kRmsProp:
      if (o.centered) {
        return o.momentum != 0 ? Formula::kRmsPropCenteredMomentum
                               : Formula::kRmsPropCentered;
      }
      return o.momentum != 0 ? Formula::kRmsPropMomentum : Formula::kRmsProp;
    case Algorithm::kLion:
      return Formula::kLion;
    case Algorithm::kLamb:
      return Formula::kLambDirection;
    case Algorithm::kMuon:
      return Formula::kMuonDirection;
    case Algorithm::kAdafactor:
      return Formula::kAdafactorDirection;
    case Algorithm::kScheduleFree:
      return Formula::kScheduleFree;
    case Algorithm::kCustom:
    case Algorithm::kCustomOfRate:
      return Formula::kCustom;
  }
}

bool IsDirection(Formula formula) {
  return formula == Formula::kLambDirection ||
         formula == Formula::kMuonDirection ||
         formula == Formula::kAdafactorDirection;
}

const char* NameOf(Formula formula) {
  switch (formula) {
    case Formula::kAdamW:
      return "adamw";
    case Formula::kAdamWAmsGrad:
      return "adamw_amsgrad";
    case Formula::kAdam:
      return "adam";
    case Formula::kAdamAmsGrad:
      return "adam_amsgrad";
    case Formula::kSgd:
      return "sgd";
    case Formula::kSgdMomentum:
      return "sgd_momentum";
    case Formula::kAdagrad:
      return "adagrad";
    case Formula::kRmsProp:
      return "rmsprop";
    case Formula::kRmsPropMomentum:
      return "rmsprop_momentum";
    case Formula::kRmsPropCentered:
      return "rmsprop_centered";
    case Formula::kRmsPropCenteredMomentum:
      return "rmsprop_centered_momentum";
    case Formula::kLion:
      return "lion";
    case Formula::kScheduleFree:
      return "adamw_schedule_free";
    case Formula::kLambDirection:
      return "lamb";
    case Formula::kMuonDirection:
      return "muon";
    case Formula::kAdafactorDirection:
      return "adafactor";
    case Formula::kDescent:
      return "descent";
    case Formula::kCustom:
      return "custom";
  }
}

StepStates StatesOf(Formula formula) {
  StepStates states = NamesOfStates(formula);
  VisitFormula(formula, [&](auto f) {
    states.count = f.kStates;
    for (int s = 0; s < states.count; ++s) {
      states.states[s].non_negative = IsNonNegative<decltype(f)>(s);
    }
  });
  return states;
}

int StateCountOf(const OptimizerOptions& o) {
  const Formula formula = FormulaOf(o);
  return formula == Formula::kCustom ? o.custom_states
                                     : StatesOf(formula).count;
}

int64_t StateBytesOf(const OptimizerOptions& o, int64_t master_bytes,
                     int64_t numel) {
  const int64_t count = StateCountOf(o);
  const int64_t average = o.ema_decay > 0 ? master_bytes * numel : 0;
  if (master_bytes != 4) return count * master_bytes * numel + average;
  switch (o.states) {
    case StateType::kFloat32:
      return average + count * BytesOf(NumberType::kFloat32, numel);
    case StateType::kBFloat16:
      return average + count * BytesOf(NumberType::kBFloat16, numel);
    case StateType::kBlock8:
      return average + count * BytesOf(NumberType::kBlock8, numel);
  }
}

StepCoefficients CoefficientsOf(const OptimizerOptions& o, int64_t step,
                                double gradient_factor, uint64_t seed) {
  const auto steps = static_cast<double>(step);
  StepCoefficients k;
  switch (o.algorithm) {
    case Algorithm::kAdamW:
      SetAdam(o, steps, /*l2=*/false, &k);
      break;
    case Algorithm::kAdam:
      SetAdam(o, steps, /*l2=*/true, &k);
      break;
    case Algorithm::kSgd:
      SetSgd(o, steps, &k);
      break;
    case Algorithm::kAdagrad:
      SetAdagrad(o, steps, &k);
      break;
    case Algorithm::kRmsProp:
      SetRmsProp(o, &k);
      break;
    case Algorithm::kLion:
      SetLion(o, &k);
      break;
    case Algorithm::kLamb:
      SetLamb(o, steps, &k);
      break;
    case Algorithm::kMuon:
      SetMuon(o, &k);
      break;
    case Algorithm::kScheduleFree:
      SetScheduleFree(o, steps, &k);
      break;
    case Algorithm::kAdafactor:
    case Algorithm::kCustom:
    case Algorithm::kCustomOfRate:
      break;
  }
  SetAverage(o, step, &k);
  k.gradient_factor = gradient_factor;
  k.sign = o.maximize ? -1 : 1;
  k.seed = seed;
  return k;
}

StepCoefficients DescentOf(const OptimizerOptions& o, int64_t step,
                           double scale) {
  using F = DescentFormula;
  StepCoefficients k;
  SetAverage(o, step, &k);
  const bool adafactor = o.algorithm == Algorithm::kAdafactor;
  const bool decays =
      (o.algorithm == Algorithm::kMuon || adafactor) && o.weight_decay != 0;
  const double rate =
      adafactor ? std::min(o.lr, 1 / std::sqrt(static_cast<double>(step)))
                : o.lr;
  k.values[F::kDecay] = decays ? 1 - o.lr * o.weight_decay : 1;
  k.values[F::kMinusRate] = -(rate * scale);
  return k;
}

uint64_t SeedOf(int64_t parameter, int64_t step) {
  return Mixed(Mixed(static_cast<uint64_t>(parameter) + 0x9e3779b97f4a7c15u) ^
               static_cast<uint64_t>(step));
}

}  // namespace tessera
