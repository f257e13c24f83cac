// Compares the kernel of every formula with the oracle's step
// (verify/oracle_step.h), which shares no code with it: masters and states have
// the same bits, also for every combination of numbers that arithmetic treats
// specially.
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"
#include "verify/oracle_step.h"

namespace tessera {
namespace {

struct Case {
  std::string name;
  OptimizerOptions ours;
  OracleStepOptions oracles;
};

// Sets the fields that both types have.
template <typename Options>
void SetAll(Options* o, double weight_decay) {
  o->lr = 0.01;
  o->weight_decay = weight_decay;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Algorithm algorithm, const auto& set) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool maximize : {false, true}) {
        Case c;
        c.name = absl::StrCat(name, " decay ", weight_decay,
                              maximize ? " maximize" : "");
        c.ours.algorithm = algorithm;
        c.oracles.algorithm = NameOf(algorithm);
        c.ours.maximize = c.oracles.maximize = maximize;
        SetAll(&c.ours, weight_decay);
        SetAll(&c.oracles, weight_decay);
        set(&c.ours);
        set(&c.oracles);
        cases.push_back(std::move(c));
      }
    }
  };
  const auto none = [](auto*) {};
  const auto amsgrad = [](auto* o) { o->amsgrad = true; };
  const auto uncorrected = [](auto* o) {
    o->bias_correction = false;
    o->beta1 = 0.3;  // from the other end
  };
  add("AdamW", Algorithm::kAdamW, none);
  add("AdamW amsgrad", Algorithm::kAdamW, amsgrad);
  add("AdamW uncorrected", Algorithm::kAdamW, uncorrected);
  add("Adam", Algorithm::kAdam, none);
  add("Adam amsgrad", Algorithm::kAdam, amsgrad);
  add("Adam uncorrected", Algorithm::kAdam, uncorrected);
  add("SGD", Algorithm::kSgd, none);
  add("SGD momentum", Algorithm::kSgd, [](auto* o) {
    o->momentum = 0.9;
    o->dampening = 0.3;
  });
  add("SGD nesterov", Algorithm::kSgd, [](auto* o) {
    o->momentum = 0.9;
    o->nesterov = true;
  });
  add("Adagrad", Algorithm::kAdagrad, [](auto* o) {
    o->lr_decay = 0.1;
    o->initial_accumulator_value = 0.1;
    o->eps = 1e-10;
  });
  for (const bool centered : {false, true}) {
    for (const double momentum : {0.0, 0.7}) {
      add("RMSprop", Algorithm::kRmsProp, [=](auto* o) {
        o->centered = centered;
        o->momentum = momentum;
      });
    }
  }
  add("Lion", Algorithm::kLion, [](auto* o) { o->beta2 = 0.99; });
  add("ScheduleFree", Algorithm::kScheduleFree,
      [](auto* o) { o->average_share = 0.3; });
  return cases;
}

constexpr double kInf = std::numeric_limits<double>::infinity();

// Zeros of both signs, what rounds to zero or overflows, and NaN.
std::vector<double> Odd() {
  return {0,     -0.0,   1,     -1,     0x1p-149,    -0x1p-149, 0x1p-126,
          1e-38, -3e-20, 3e38,  -3e38,  1.5e19,      -kInf,     kInf,
          0.1,   -7.3,   1e-10, 1234.5, std::nan("")};
}

// Makes each combination of a master and a gradient, as tensors of shape [n].
void SetOdd(at::ScalarType dtype, at::Tensor* master, at::Tensor* gradient) {
  std::vector<double> masters, gradients;
  for (const double m : Odd()) {
    for (const double g : Odd()) {
      masters.push_back(m);
      gradients.push_back(g);
    }
  }
  *master = torch::tensor(masters, at::kDouble).to(dtype);
  *gradient = torch::tensor(gradients, at::kDouble).to(dtype);
}

at::Tensor Bits(const at::Tensor& t) {
  return t.view(t.element_size() == 8   ? at::kLong
                : t.element_size() == 4 ? at::kInt
                                        : at::kShort);
}

NumberType TypeOf(at::ScalarType dtype) {
  return dtype == at::kDouble     ? NumberType::kFloat64
         : dtype == at::kBFloat16 ? NumberType::kBFloat16
                                  : NumberType::kFloat32;
}

constexpr int64_t kParameter = 5;

// Both train `master` with the gradients, from element `number` on.
class Pair {
 public:
  Pair(Case c, const at::Tensor& master, bool narrow, int64_t number)
      : case_(std::move(c)),
        master_(master.clone()),
        expected_(master.clone()),
        number_(number) {
    case_.oracles.bf16_states = narrow;
    states_ = OracleStates(master, case_.oracles);
    expected_states_ = OracleStates(master, case_.oracles);
    EXPECT_EQ(states_.size(),
              static_cast<size_t>(StatesOf(FormulaOf(case_.ours)).count));
  }

  // Returns the first difference, or "".
  std::string Step(const at::Tensor& gradient, int64_t step, Isa isa) {
    StepRange r;
    r.master = master_.data_ptr();
    r.master_type = r.state_type = TypeOf(master_.scalar_type());
    r.gradient_type = r.master_type;
    for (size_t s = 0; s < states_.size(); ++s) {
      r.states[s] = states_[s].data_ptr();
      r.state_type = TypeOf(states_[s].scalar_type());
    }
    r.gradient = gradient.const_data_ptr();
    r.numel = master_.numel();
    r.number = number_;
    StepElements(FormulaOf(case_.ours), r,
                 CoefficientsOf(case_.ours, step, 1, SeedOf(kParameter, step)),
                 isa);
    OracleRandom random;
    random.parameter = kParameter;
    random.numbers = at::arange(number_, number_ + r.numel, at::kLong);
    OracleStep(expected_, expected_states_, gradient, step, case_.oracles,
               random, /*elementwise=*/true);
    std::string difference = Difference("master", expected_, master_, step);
    for (size_t s = 0; s < states_.size() && difference.empty(); ++s) {
      difference = Difference(absl::StrCat("state ", s), expected_states_[s],
                              states_[s], step);
    }
    return difference;
  }

 private:
  // NaN of bfloat16 has the bits of whoever has converted it.
  std::string Difference(const std::string& what, const at::Tensor& expected,
                         const at::Tensor& got, int64_t step) const {
    at::Tensor differs = Bits(expected).ne(Bits(got));
    if (got.scalar_type() == at::kBFloat16) {
      differs = differs.logical_and(
          expected.isnan().logical_and(got.isnan()).logical_not());
    }
    if (!differs.any().item<bool>()) return "";
    const auto at = differs.nonzero()[0].item<int64_t>();
    return absl::StrCat(case_.name, " step ", step, ": ", what, "[", at,
                        "] is ", got[at].to(at::kDouble).item<double>(),
                        ", the oracle has ",
                        expected[at].to(at::kDouble).item<double>());
  }

  Case case_;
  at::Tensor master_, expected_;
  std::vector<at::Tensor> states_, expected_states_;
  int64_t number_;
};

std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

struct Kind {
  at::ScalarType dtype;
  bool narrow;
};
constexpr Kind kKinds[] = {
    {at::kFloat, false}, {at::kFloat, true}, {at::kDouble, false}};

TEST(OracleBitsTest, OfManyStepsOfNumbersOfAllSizes) {
  for (const Kind kind : kKinds) {
    for (const Case& c : Cases()) {
      for (const Isa isa : Isas()) {
        torch::manual_seed(3);
        const int64_t numel = 1009;
        Pair pair(c, torch::randn({numel}, kind.dtype), kind.narrow, 0);
        for (int64_t step = 1; step <= 6; ++step) {
          const at::Tensor gradient =
              torch::randn({numel}, kind.dtype) *
              torch::logspace(-8, 3, numel, 10, kind.dtype);
          ASSERT_EQ(pair.Step(gradient, step, isa), "") << IsaName(isa);
        }
      }
    }
  }
}

// Signs of zeros and NaNs, too; then from the states that they left.
TEST(OracleBitsTest, OfNumbersThatArithmeticTreatsApart) {
  for (const Kind kind : kKinds) {
    at::Tensor master, gradient;
    SetOdd(kind.dtype, &master, &gradient);
    for (const Case& c : Cases()) {
      for (const Isa isa : Isas()) {
        Pair pair(c, master, kind.narrow, 0);
        ASSERT_EQ(pair.Step(gradient, 1, isa), "") << IsaName(isa);
        ASSERT_EQ(pair.Step(gradient.flip(0), 2, isa), "") << IsaName(isa);
        ASSERT_EQ(pair.Step(torch::zeros_like(gradient), 3, isa), "")
            << IsaName(isa);
      }
    }
  }
}

// Numbers of elements go beyond 32 bits.
TEST(OracleBitsTest, OfRandomBitsOfHighNumbers) {
  for (const int64_t number : {int64_t{17}, (int64_t{1} << 32) - 100}) {
    for (const Case& c : Cases()) {
      Pair pair(c, torch::ones({333}), /*narrow=*/true, number);
      for (int64_t step = 1; step <= 3; ++step) {
        ASSERT_EQ(pair.Step(torch::randn({333}), step, BestIsa()), "");
      }
    }
  }
}

}  // namespace
}  // namespace tessera
