// Every formula, over a hundred steps: float64 against torch::optim's classes
// (Lion against its paper's formula; ScheduleFree: schedule_free_test.cc),
// float32 against it within the rounding errors that its own operations make,
// and against itself: instruction sets, lengths, cuts, types of gradients.
#include "optim/formulas/formulas.h"

#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

struct Case {
  const char* name;
  OptimizerOptions options;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Algorithm algorithm,
                       const std::function<void(OptimizerOptions*)>& set) {
    OptimizerOptions o;
    o.algorithm = algorithm;
    o.lr = 1e-2;
    o.weight_decay = 0.1;
    set(&o);
    cases.push_back({name, o});
  };
  add("AdamW", Algorithm::kAdamW, [](auto*) {});
  add("AdamWAmsGrad", Algorithm::kAdamW, [](auto* o) { o->amsgrad = true; });
  add("Adam", Algorithm::kAdam, [](auto*) {});
  add("AdamAmsGrad", Algorithm::kAdam, [](auto* o) { o->amsgrad = true; });
  add("Sgd", Algorithm::kSgd, [](auto*) {});
  add("SgdMomentum", Algorithm::kSgd, [](auto* o) {
    o->momentum = 0.9;
    o->dampening = 0.3;
  });
  add("SgdNesterov", Algorithm::kSgd, [](auto* o) {
    o->momentum = 0.9;
    o->nesterov = true;
  });
  add("Adagrad", Algorithm::kAdagrad, [](auto* o) {
    o->lr_decay = 0.01;
    o->initial_accumulator_value = 0.1;
    o->eps = 1e-10;
  });
  add("RmsProp", Algorithm::kRmsProp, [](auto*) {});
  add("RmsPropMomentum", Algorithm::kRmsProp,
      [](auto* o) { o->momentum = 0.9; });
  add("RmsPropCentered", Algorithm::kRmsProp, [](auto* o) {
    o->centered = true;
    o->alpha = 0.9;
  });
  add("RmsPropCenteredMomentum", Algorithm::kRmsProp, [](auto* o) {
    o->centered = true;
    o->momentum = 0.5;
  });
  add("Lion", Algorithm::kLion, [](auto* o) { o->beta2 = 0.99; });
  add("ScheduleFree", Algorithm::kScheduleFree,
      [](auto* o) { o->average_share = 0.3; });
  return cases;
}

std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

// Masters and states, [n] each, of one dtype; zeros at first.
struct Trained {
  Trained(const OptimizerOptions& options, const at::Tensor& start)
      : options(options), master(start.clone()) {
    for (int s = 0; s < StatesOf(FormulaOf(options)).count; ++s) {
      states.push_back(torch::zeros_like(master));
    }
  }
  StepRange Range(const at::Tensor& gradient) const {
    StepRange r;
    r.master = master.data_ptr();
    for (size_t s = 0; s < states.size(); ++s) {
      r.states[s] = states[s].data_ptr();
    }
    r.gradient = gradient.const_data_ptr();
    r.numel = master.numel();
    if (master.scalar_type() == at::kDouble) {
      r.master_type = r.state_type = r.gradient_type = NumberType::kFloat64;
    } else if (gradient.scalar_type() == at::kBFloat16) {
      r.gradient_type = NumberType::kBFloat16;
    } else if (gradient.scalar_type() == at::kHalf) {
      r.gradient_type = NumberType::kFloat16;
    }
    return r;
  }
  void Step(const at::Tensor& gradient, int64_t step, Isa isa = BestIsa(),
            double factor = 1) {
    StepElements(FormulaOf(options), Range(gradient),
                 CoefficientsOf(options, step, factor), isa);
  }
  OptimizerOptions options;
  at::Tensor master;
  std::vector<at::Tensor> states;
};

at::Tensor GradientOf(int64_t numel, int64_t step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  return torch::randn({numel}, at::kDouble);
}

// ---- the plain formulas, of float64 tensors

std::unique_ptr<torch::optim::Optimizer> TorchOptim(
    const OptimizerOptions& o, const at::Tensor& parameter) {
  namespace optim = torch::optim;
  const std::vector<at::Tensor> all = {parameter};
  switch (o.algorithm) {
    case Algorithm::kAdamW:
      return std::make_unique<optim::AdamW>(all,
                                            optim::AdamWOptions(o.lr)
                                                .betas({o.beta1, o.beta2})
                                                .eps(o.eps)
                                                .weight_decay(o.weight_decay)
                                                .amsgrad(o.amsgrad));
    case Algorithm::kAdam:
      return std::make_unique<optim::Adam>(all,
                                           optim::AdamOptions(o.lr)
                                               .betas({o.beta1, o.beta2})
                                               .eps(o.eps)
                                               .weight_decay(o.weight_decay)
                                               .amsgrad(o.amsgrad));
    case Algorithm::kSgd:
      return std::make_unique<optim::SGD>(all,
                                          optim::SGDOptions(o.lr)
                                              .momentum(o.momentum)
                                              .dampening(o.dampening)
                                              .nesterov(o.nesterov)
                                              .weight_decay(o.weight_decay));
    case Algorithm::kAdagrad:
      return std::make_unique<optim::Adagrad>(
          all, optim::AdagradOptions(o.lr)
                   .lr_decay(o.lr_decay)
                   .initial_accumulator_value(o.initial_accumulator_value)
                   .eps(o.eps)
                   .weight_decay(o.weight_decay));
    case Algorithm::kRmsProp:
      return std::make_unique<optim::RMSprop>(
          all, optim::RMSpropOptions(o.lr)
                   .alpha(o.alpha)
                   .eps(o.eps)
                   .momentum(o.momentum)
                   .centered(o.centered)
                   .weight_decay(o.weight_decay));
    default:
      return nullptr;
  }
}

class LionByThePaper {
 public:
  void Step(const OptimizerOptions& o, const at::Tensor& gradient,
            const at::Tensor& master) {
    if (!exp_avg_.defined()) exp_avg_ = torch::zeros_like(master);
    const at::Tensor mixed = exp_avg_ * o.beta1 + gradient * (1 - o.beta1);
    master.mul_(1 - o.lr * o.weight_decay).sub_(mixed.sign() * o.lr);
    exp_avg_ = exp_avg_ * o.beta2 + gradient * (1 - o.beta2);
  }

 private:
  at::Tensor exp_avg_;
};

constexpr int64_t kNumel = 1009;
constexpr int kSteps = 100;

// Rounding errors of float64, each 2^-53 of what is about 1 here, add up over
// some twenty operations a step and are not amplified by more than the steps.
TEST(FormulasTest, Float64IsTorchOptims) {
  constexpr double kBound = 0x1p-53 * 20 * kSteps * kSteps;
  for (const Case& c : Cases()) {
    if (c.options.algorithm == Algorithm::kScheduleFree) continue;
    torch::manual_seed(7);
    const at::Tensor start = torch::randn({kNumel}, at::kDouble);
    Trained ours(c.options, start);
    at::Tensor parameter = start.clone();
    const auto optimizer = TorchOptim(c.options, parameter);
    LionByThePaper lion;
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor gradient = GradientOf(kNumel, step);
      ours.Step(gradient, step);
      if (optimizer == nullptr) {
        lion.Step(c.options, gradient, parameter);
        continue;
      }
      parameter.mutable_grad() = gradient;
      optimizer->step();
    }
    const double apart = (ours.master - parameter).abs().max().item<double>();
    EXPECT_LT(apart, kBound) << c.name;
    EXPECT_GT((start - parameter).abs().min().item<double>(), 1e-6) << c.name;
  }
}

// A number, and by how much float32 may be off of it: what its operands may be
// off by, and half a unit in the last place of each result.
struct Tracked {
  static Tracked Of(double x) { return {x, 0}; }
  double x, error;
};
constexpr double kUnit = 0x1p-24, kTiny = 0x1p-149;
Tracked Rounded(double x, double error) {
  return {x, error + kUnit * (std::abs(x) + error) + kTiny};
}
Tracked operator+(Tracked a, Tracked b) {
  return Rounded(a.x + b.x, a.error + b.error);
}
Tracked operator-(Tracked a, Tracked b) {
  return Rounded(a.x - b.x, a.error + b.error);
}
double ProductError(Tracked a, Tracked b) {
  return std::abs(a.x) * b.error + std::abs(b.x) * a.error + a.error * b.error;
}
Tracked operator*(Tracked a, Tracked b) {
  return Rounded(a.x * b.x, ProductError(a, b));
}
Tracked MultiplyAdd(Tracked a, Tracked b, Tracked c) {
  return Rounded(a.x * b.x + c.x, ProductError(a, b) + c.error);
}
Tracked operator/(Tracked a, Tracked b) {
  const double least = std::abs(b.x) - b.error;
  if (!(least > 0)) return {a.x / b.x, std::numeric_limits<double>::infinity()};
  const double quotient = a.x / b.x;
  return Rounded(quotient, (a.error + std::abs(quotient) * b.error) / least);
}
Tracked SquareRoot(Tracked a) {
  const double root = std::sqrt(a.x);
  const double least = std::max(a.x - a.error, 0.0);
  return Rounded(root, root - std::sqrt(least));
}
Tracked Max(Tracked a, Tracked b) {
  return {std::max(a.x, b.x), std::max(a.error, b.error)};
}
Tracked Sign(Tracked a) {
  const double sign = a.x > 0 ? 1 : a.x < 0 ? -1 : 0;
  return {sign, std::abs(a.x) <= a.error ? 2.0 : 0.0};
}

// One step of float64 from where float32 is, by the plain formulas of the test
// above, and how far float32 may end from there.
std::vector<Tracked> TrackedStep(const Trained& from,
                                 const at::Tensor& gradient, int64_t step) {
  const StepCoefficients k = CoefficientsOf(from.options, step);
  Tracked c[kMaxCoefficients];
  for (int i = 0; i < kMaxCoefficients; ++i) c[i] = Rounded(k.values[i], 0);
  std::vector<Tracked> masters;
  for (int64_t i = 0; i < from.master.numel(); ++i) {
    Tracked master = {from.master.data_ptr<float>()[i], 0};
    const Tracked g = {gradient.data_ptr<float>()[i], 0};
    Tracked states[kMaxStates];
    for (size_t s = 0; s < from.states.size(); ++s) {
      states[s] = {from.states[s].data_ptr<float>()[i], 0};
    }
    VisitFormula(FormulaOf(from.options), [&](auto f) {
      decltype(f)::Step(c, k.variant, g, &master, states);
    });
    masters.push_back(master);
    for (size_t s = 0; s < from.states.size(); ++s)
      masters.push_back(states[s]);
  }
  return masters;
}

TEST(FormulasTest, Float32IsFloat64WithinItsRounding) {
  constexpr int64_t kFew = 67;
  for (const Case& c : Cases()) {
    torch::manual_seed(8);
    Trained ours(c.options, torch::randn({kFew}));
    double most = 0;  // of the bound
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor gradient = GradientOf(kFew, step).to(at::kFloat);
      const std::vector<Tracked> expected = TrackedStep(ours, gradient, step);
      // StepElements in float64, which the test above checks, gives the same.
      Trained wide(c.options, ours.master.to(at::kDouble));
      for (size_t s = 0; s < ours.states.size(); ++s) {
        wide.states[s] = ours.states[s].to(at::kDouble);
      }
      wide.Step(gradient.to(at::kDouble), step);
      ours.Step(gradient, step);
      const size_t width = 1 + ours.states.size();
      for (int64_t i = 0; i < kFew; ++i) {
        for (size_t s = 0; s < width; ++s) {
          const at::Tensor& narrow = s == 0 ? ours.master : ours.states[s - 1];
          const at::Tensor& exact = s == 0 ? wide.master : wide.states[s - 1];
          const double apart = std::abs(narrow.data_ptr<float>()[i] -
                                        exact.data_ptr<double>()[i]);
          const double bound =
              expected[static_cast<size_t>(i) * width + s].error;
          ASSERT_LE(apart, bound) << c.name << " step " << step << " element "
                                  << i << " state " << s;
          most = std::max(most, apart / bound);
        }
      }
    }
    EXPECT_GT(most, 0.01) << c.name << ": the bound says nothing";
  }
}

// ---- the same bits however it is done

std::string BitsOf(const at::Tensor& t) {
  return std::string(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
}
std::string BitsOf(const Trained& t) {
  std::string bits = BitsOf(t.master);
  for (const at::Tensor& state : t.states) bits += BitsOf(state);
  return bits;
}

TEST(FormulasTest, InstructionSetsAndCutsHaveTheSameBits) {
  for (const Case& c : Cases()) {
    for (const int64_t numel : {0, 1, 15, 16, 17, 1009, 1 << 18}) {
      if (numel == 1 << 18 && c.options.amsgrad) continue;  // slow
      torch::manual_seed(9);
      const at::Tensor start = torch::randn({numel});
      Trained first(c.options, start);
      for (int step = 1; step <= 3; ++step) {
        first.Step(GradientOf(numel, step).to(at::kFloat), step, Isa::kPortable,
                   0.3);
      }
      for (const Isa isa : Isas()) {
        Trained cut(c.options, start);
        for (int step = 1; step <= 3; ++step) {
          const at::Tensor gradient = GradientOf(numel, step).to(at::kFloat);
          const StepRange all = cut.Range(gradient);
          const int64_t piece = numel > 2000 ? 83'333 : 37;
          for (int64_t begin = 0; begin < numel; begin += piece) {
            StepElements(FormulaOf(c.options),
                         Part(all, begin, std::min(begin + piece, numel)),
                         CoefficientsOf(c.options, step, 0.3), isa);
          }
        }
        ASSERT_TRUE(BitsOf(cut) == BitsOf(first))
            << c.name << " " << IsaName(isa) << " " << numel;
      }
    }
  }
}

// A gradient of 16 bits is what it is as float32: every one there is, too.
TEST(FormulasTest, GradientsOf16BitsAreReadAsTheyAre) {
  const Case c = Cases()[5];
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor every =
        torch::arange(-32768, 32768).to(at::kShort).view(dtype);
    const at::Tensor start = torch::zeros({every.numel()});
    for (const Isa isa : Isas()) {
      Trained narrow(c.options, start), wide(c.options, start);
      narrow.Step(every, 1, isa, 0.3);
      wide.Step(every.to(at::kFloat), 1, isa, 0.3);
      ASSERT_TRUE(BitsOf(narrow) == BitsOf(wide))
          << IsaName(isa) << " " << c10::toString(dtype);
      Trained part(c.options, start);
      const StepCoefficients k = CoefficientsOf(c.options, 1, 0.3);
      for (int64_t begin = 0; begin < 200; begin += 29) {
        StepElements(FormulaOf(c.options),
                     Part(part.Range(every), begin, begin + 29), k, isa);
      }
      EXPECT_TRUE(BitsOf(part.master.slice(0, 0, 203)) ==
                  BitsOf(wide.master.slice(0, 0, 203)));
    }
  }
}

TEST(FormulasTest, MaximizeClimbs) {
  for (const Case& c : Cases()) {
    Trained down(c.options, torch::randn({50})), up(c.options, down.master);
    up.options.maximize = true;
    const at::Tensor gradient = torch::randn({50});
    down.Step(gradient, 1);
    up.Step(-gradient, 1);
    EXPECT_TRUE(BitsOf(up) == BitsOf(down)) << c.name;
  }
}

}  // namespace
}  // namespace tessera
