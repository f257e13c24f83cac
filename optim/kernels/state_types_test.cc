// States of 16 and of 8 bits: what their memory holds, that it is the same
// however a range is cut and by whatever instructions, and how far a training
// with them is from one with float32.
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"
#include "optim/kernels/state_types_test_util.h"

namespace tessera {
namespace {

constexpr NumberType kTypes[] = {NumberType::kBFloat16, NumberType::kBlock8};

TEST(StateTypesTest, InstructionSetsAndCutsHaveTheSameBits) {
  for (const NumberType type : kTypes) {
    for (const int64_t numel : {1, 15, 17, 63, 64, 65, 1009, 5000}) {
      SteppedStates whole(numel, type);
      for (int step = 1; step <= 4; ++step) Step(whole, step, Isa::kPortable);
      for (const Isa isa : Isas()) {
        // Blocks are cut at their ends; a later test cuts within one.
        const int64_t piece = type == NumberType::kBlock8 ? 128 : 29;
        SteppedStates cut(numel, type);
        for (int step = 1; step <= 4; ++step) {
          const at::Tensor gradient = GradientOf(numel, step);
          const auto k = CoefficientsOf({.lr = 1e-2}, step, 1, SeedOf(3, step));
          for (int64_t begin = 0; begin < numel; begin += piece) {
            StepElements(kFormula,
                         Part(cut.Range(gradient), begin,
                              std::min(begin + piece, numel)),
                         k, isa);
          }
        }
        ASSERT_TRUE(cut.Bits() == whole.Bits())
            << IsaName(isa) << " " << numel << " " << static_cast<int>(type);
      }
    }
  }
}

// ---- bfloat16

// The mean of many elements with one value is that value, as only stochastic
// rounding gives it: off by less than six of its standard deviations, which are
// at most half a unit over the root of their number.
TEST(StateTypesTest, BFloat16IsRoundedWithoutBias) {
  constexpr int64_t kNumel = 1 << 16;
  for (const float value : {1.003f, -0.7001f, 3.1e-5f}) {
    for (const Isa isa : Isas()) {
      SteppedStates m(kNumel, NumberType::kBFloat16);
      const at::Tensor gradient = torch::full({kNumel}, value);
      OptimizerOptions take;  // exp_avg becomes the gradient
      take.beta1 = 0;
      StepElements(kFormula, m.Range(gradient),
                   CoefficientsOf(take, 1, 1, SeedOf(1, 1)), isa);
      const at::Tensor held = m.states[0].view(at::kBFloat16).to(at::kDouble);
      const double unit = std::abs(value) * 0x1p-7;
      EXPECT_LT(std::abs(held.mean().item<double>() - value),
                6 * unit / 2 / std::sqrt(static_cast<double>(kNumel)));
      EXPECT_LE((held - value).abs().max().item<double>(), unit);
      // Neighbours are independent: as often the same as not.
      const at::Tensor up = held > value;
      const double share = up.to(at::kDouble).mean().item<double>();
      const double both = (up.slice(0, 1) & up.slice(0, 0, kNumel - 1))
                              .to(at::kDouble)
                              .mean()
                              .item<double>();
      EXPECT_LT(std::abs(both - share * share),
                6 / std::sqrt(static_cast<double>(kNumel)));
    }
  }
}

TEST(StateTypesTest, RandomBitsAreOfTheStepTheParameterAndTheElement) {
  constexpr int64_t kNumel = 640;
  const at::Tensor gradient = torch::full({kNumel}, 1.003f);
  OptimizerOptions take;
  take.beta1 = 0;
  const auto held = [&](int64_t parameter, int64_t step, int64_t number) {
    SteppedStates m(kNumel, NumberType::kBFloat16);
    StepRange range = m.Range(gradient);
    range.number = number;
    StepElements(kFormula, range,
                 CoefficientsOf(take, 1, 1, SeedOf(parameter, step)));
    return m.states[0].view(at::kBFloat16).to(at::kFloat);
  };
  const at::Tensor one = held(0, 1, 0);
  EXPECT_TRUE(one.equal(held(0, 1, 0)));
  // Others: where the two roundings are as good as independent, a share of
  // p^2 + (1 - p)^2 is the same; all would be if something were left out.
  for (const at::Tensor& other : {held(1, 1, 0), held(0, 2, 0), held(0, 1, 640),
                                  held(0, 1, int64_t{1} << 32)}) {
    EXPECT_FALSE(one.equal(other));
  }
  // By their number in the parameter.
  EXPECT_TRUE(one.slice(0, 64).equal(held(0, 1, 64).slice(0, 0, 576)));
}

// ---- a training

// A linear regression, from zeros: the loss after 300 steps. Few bits of the
// moments must cost little of it.
double LossAfterTraining(NumberType type) {
  constexpr int64_t kFeatures = 256, kSamples = 512;
  torch::manual_seed(11);
  const at::Tensor x = torch::randn({kSamples, kFeatures}),
                   goal = torch::randn({kFeatures}), y = x.matmul(goal);
  SteppedStates m(kFeatures, type);
  double loss = 0;
  for (int step = 1; step <= 300; ++step) {
    const at::Tensor off = x.matmul(m.master) - y;
    loss = off.square().mean().item<double>();
    const at::Tensor gradient =
        x.t().matmul(off).mul(2.0 / kSamples).contiguous();
    StepElements(kFormula, m.Range(gradient),
                 CoefficientsOf({.lr = 2e-2}, step, 1, SeedOf(0, step)));
  }
  return loss;
}

TEST(StateTypesTest, TrainsAsFloat32Does) {
  const double wide = LossAfterTraining(NumberType::kFloat32);
  for (const NumberType type : kTypes) {
    const double loss = LossAfterTraining(type);
    RecordProperty(absl::StrCat("loss_", static_cast<int>(type)),
                   absl::StrCat(loss, " of ", wide));
    // From 256 to about this: a thousandth of the way.
    EXPECT_LT(loss, wide + 0.256) << static_cast<int>(type);
  }
}

}  // namespace
}  // namespace tessera
