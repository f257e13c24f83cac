// The kernels of CUDA, and libtorch's operators where there are none, against
// the CPU, to the bit; skipped where there is no GPU.
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/cuda/step_testing.h"
#include "optim/device_kernels.h"
#include "optim/kernels/element_step.h"
#include "optim/norm/block_powers.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class OptimGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
    torch::manual_seed(1);
  }
};

class OptimKernelsGpu : public OptimGpu {
 protected:
  void SetUp() override {
    if (kernels_ == nullptr) GTEST_SKIP() << "a build without CUDA";
    OptimGpu::SetUp();
  }
  const DeviceKernels* const kernels_ = DeviceKernelsOf(at::kCUDA);
};

// With or without a GPU; gpu_check (bundle/) runs the others.
TEST(OptimKernels, AreThereInABuildWithCuda) {
#ifdef TESSERA_HAS_CUDA
  ASSERT_NE(DeviceKernelsOf(at::kCUDA), nullptr);
  EXPECT_TRUE(DeviceKernelsOf(at::kCUDA)->HasNorm(2, at::kComplexFloat));
  EXPECT_FALSE(DeviceKernelsOf(at::kCUDA)->HasNorm(1, at::kComplexFloat));
  EXPECT_FALSE(DeviceKernelsOf(at::kCUDA)->HasNorm(3, at::kFloat));
#else
  EXPECT_EQ(DeviceKernelsOf(at::kCUDA), nullptr);
#endif
}

bool SameBits(const at::Tensor& of_device, const at::Tensor& expected) {
  const at::Tensor got = of_device.cpu();
  return got.nbytes() == expected.nbytes() &&
         std::memcmp(got.const_data_ptr(), expected.const_data_ptr(),
                     got.nbytes()) == 0;
}

// ---- the norm by libtorch's operators

TEST_F(OptimGpu, BlockPowersAreTheCpus) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = torch::randn({100003}).to(dtype);
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      const at::Tensor blocks =
          BlockPowersByOperators(x.to(at::kCUDA), 5, p).cpu().contiguous();
      const double* const data = blocks.const_data_ptr<double>();
      EXPECT_EQ(std::vector<double>(data, data + blocks.numel()),
                BlockPowers(x, 5, p))
          << dtype << ", p " << p;
    }
  }
}

TEST_F(OptimGpu, NormIsTheCpus) {
  const at::Tensor x = torch::randn({(1 << 22) + 77});
  const at::Tensor z = torch::randn({1000}, at::kComplexFloat);
  NormSum cpu(2), gpu(2);
  cpu.Add(x, 9);
  cpu.Add(z, 0);
  gpu.Add(x.to(at::kCUDA), 9);
  gpu.Add(z.to(at::kCUDA), 0);
  gpu.Finish();
  EXPECT_EQ(gpu.Serialize(), cpu.Serialize());
}

// ---- the norm by kernels

at::Tensor OnGpu(int64_t numel, at::ScalarType dtype) {
  return torch::zeros({numel}, at::TensorOptions(dtype).device(at::kCUDA));
}

at::Tensor AnyBits(int64_t numel, at::ScalarType dtype) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  return torch::randint(0, 256, {numel * bytes}, at::kByte).view(dtype);
}

// From 1e-300 to 1e150, as far as the dtype goes.
at::Tensor Wide(int64_t numel, at::ScalarType dtype) {
  const at::Tensor powers = torch::randint(-300, 150, {numel}, at::kDouble);
  return (torch::randn({numel}, at::kDouble) * torch::pow(10.0, powers))
      .nan_to_num(0, 1, -1)
      .to(dtype);
}

// What FinishNorm makes of a NormSum, without a maximum.
at::Tensor Expected(const NormSum& sum) {
  double norm = sum.Norm();
  if (std::isnan(norm)) norm = std::numeric_limits<double>::quiet_NaN();
  return torch::tensor({1.0, 0.0, norm, norm, 0.0}, at::kDouble);
}

TEST_F(OptimKernelsGpu, NormIsTheCpus) {
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                             at::kComplexFloat}) {
      if (!kernels_->HasNorm(p, dtype)) continue;
      NormSum expected(p);
      const at::Tensor sum = OnGpu(kNormWords, at::kLong);
      const at::Tensor scalars = OnGpu(kStepScalars, at::kDouble);
      for (const int64_t numel : {1, 63, 64, 65, 1000, 100003, 3000017}) {
        for (const int64_t first : {0, 5}) {
          const at::Tensor x = torch::randn({numel}).to(dtype);
          expected.Add(x, first);
          kernels_->AddToNorm({{x.to(at::kCUDA), first}}, p, sum);
        }
      }
      kernels_->FinishNorm(sum, {.p = p}, scalars);
      EXPECT_TRUE(SameBits(scalars, Expected(expected)))
          << dtype << ", p " << p << ": " << scalars.cpu();
    }
  }
}

// Each value is a sum of its own: rounding, subnormals, overflow, NaN.
TEST_F(OptimKernelsGpu, AllMagnitudesAreTheCpus) {
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (int round = 0; round < 100; ++round) {
        const at::Tensor x =
            round % 2 == 0 ? Wide(3000, dtype) : AnyBits(1 + round / 2, dtype);
        NormSum expected(p);
        expected.Add(x, 0);
        const at::Tensor sum = OnGpu(kNormWords, at::kLong);
        const at::Tensor scalars = OnGpu(kStepScalars, at::kDouble);
        kernels_->AddToNorm({{x.to(at::kCUDA), 0}}, p, sum);
        kernels_->FinishNorm(sum, {.p = p}, scalars);
        ASSERT_TRUE(SameBits(scalars, Expected(expected)))
            << dtype << ", p " << p << ": " << scalars.cpu();
      }
    }
  }
}

TEST_F(OptimKernelsGpu, ScalarsAreTheCpus) {
  constexpr int64_t kGroup = 3;
  NormSum expected(2);
  const at::Tensor all = OnGpu(3 * kGroup * kNormWords, at::kLong);
  for (int64_t rank = 0; rank < kGroup; ++rank) {
    const at::Tensor x = torch::randn({1000 + rank});
    expected.Add(x, 0);
    for (int64_t group = 0; group < 3; ++group) {
      kernels_->AddToNorm(
          {{x.to(at::kCUDA), 0}}, 2,
          all.narrow(0, (group * kGroup + rank) * kNormWords, kNormWords));
    }
  }
  const at::Tensor scalars = OnGpu(kStepScalars, at::kDouble);
  for (const double max_norm : {0.0, 0.5, 1e9}) {
    kernels_->FinishNorm(all, {2, kGroup, 3, max_norm, true}, scalars);
    const double norm = expected.Norm() * (1 / 3.0);
    const double clip = ClipCoefficient(norm, max_norm);
    EXPECT_TRUE(SameBits(
        scalars, torch::tensor({1 / 3.0 * clip, 0.0, norm, norm * clip, 0.0},
                               at::kDouble)))
        << max_norm << ": " << scalars.cpu();
  }
  const at::Tensor one = torch::ones({1}).to(at::kCUDA);
  kernels_->AddToNorm({{one, 0}}, 2, all.narrow(0, 7 * kNormWords, kNormWords));
  kernels_->FinishNorm(all, {.group_size = kGroup}, scalars);
  EXPECT_EQ(scalars[kReplicasDiffer].item<double>(), 7);
  kernels_->AddToNorm({{one / 0, 0}}, 2, all.narrow(0, 0, kNormWords));
  kernels_->FinishNorm(all, {.group_size = kGroup, .skip_on_overflow = true},
                       scalars);
  EXPECT_EQ(scalars[kSkip].item<double>(), 1);
  EXPECT_EQ(scalars[kGradNorm].item<double>(), kInfinity);
}

// ---- AdamW

// Every third has any bits.
at::Tensor MixedValues(int64_t numel) {
  at::Tensor x = torch::randn({numel});
  x.slice(0, 0, c10::nullopt, 3).copy_(AnyBits((numel + 2) / 3, at::kFloat));
  return x;
}

void ExpectSame(StepOperands of_device, StepOperands expected,
                const std::string& what) {
  const auto all = of_device.All(), others = expected.All();
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(SameBits(*all[i], *others[i])) << what << " " << i;
  }
}

struct Algorithms {
  OptimizerOptions options;
  StepTypes types;
};

// Each formula, and each type of memory.
std::vector<Algorithms> StepCases() {
  std::vector<Algorithms> cases;
  for (const Algorithm algorithm :
       {Algorithm::kAdamW, Algorithm::kAdam, Algorithm::kSgd,
        Algorithm::kAdagrad, Algorithm::kRmsProp, Algorithm::kLion,
        Algorithm::kScheduleFree}) {
    for (const bool more : {false, true}) {
      OptimizerOptions o = {.lr = 1e-2, .weight_decay = 0.1};
      o.algorithm = algorithm;
      o.momentum = more ? 0.9 : 0;
      o.centered = o.amsgrad = more;
      o.average_share = 0.3;
      cases.push_back({o, {}});
      StepTypes wide;
      wide.master = wide.states = wide.gradient = NumberType::kFloat64;
      cases.push_back({o, wide});
      for (const NumberType states :
           {NumberType::kFloat32, NumberType::kBFloat16, NumberType::kBlock8}) {
        cases.push_back({o, {NumberType::kBFloat16, states}});
        cases.push_back(
            {o, {NumberType::kFloat16, states, NumberType::kFloat16}});
        cases.push_back(
            {o, {NumberType::kFloat32, states, NumberType::kBFloat16}});
        for (const NumberType masters :
             {NumberType::kBFloat16, NumberType::kFloat16}) {
          cases.push_back({o, {NumberType::kNone, states, masters, masters}});
        }
        cases.push_back({o,
                         {NumberType::kBFloat16, states, NumberType::kBFloat16,
                          NumberType::kRemainder}});
      }
    }
  }
  return cases;
}

// Aligned or not, with lengths that four does not divide; and many at once.
TEST_F(OptimKernelsGpu, StepIsTheCpus) {
  for (const Algorithms& c : StepCases()) {
    const Formula formula = FormulaOf(c.options);
    for (const int64_t numel : {3, 1000, 500'003}) {
      StepOperands expected(formula, numel + 5, c.types, MixedValues);
      const StepOperands state = expected.To(at::kCUDA);
      const auto parts = [&](const StepOperands& m) {
        std::vector<StepPart> all;
        const int64_t cuts[] = {0, 1, 5, 5 + numel / 3, numel + 5};
        for (int i = 0; i < 4; ++i) {
          if (c.types.states == NumberType::kBlock8 && i > 0) break;
          const bool whole = c.types.states == NumberType::kBlock8;
          StepPart part;
          part.range =
              Part(m.Range(), cuts[i], whole ? numel + 5 : cuts[i + 1]);
          part.coefficients =
              CoefficientsOf(c.options, 7 + i, 0.37, SeedOf(i, 7));
          if (part.range.numel > 0) all.push_back(part);
        }
        return all;
      };
      for (int step = 0; step < 2; ++step) {
        kernels_->Step(formula, parts(state), {});
        for (const StepPart& part : parts(expected)) {
          StepElements(formula, part.range, part.coefficients);
        }
      }
      ExpectSame(state, expected, NameOf(formula));
    }
  }
}

TEST_F(OptimKernelsGpu, StepTakesFactorAndSkip) {
  for (const Algorithms& c : StepCases()) {
    const Formula formula = FormulaOf(c.options);
    StepOperands expected(formula, 1003, c.types, MixedValues);
    const StepOperands state = expected.To(at::kCUDA);
    at::Tensor scalars =
        torch::tensor({1 / 3.0, 0.0, 0.0, 0.0, 0.0}, at::kDouble);
    const std::vector<StepPart> parts = {
        {state.Range(), CoefficientsOf(c.options, 1, 5)}};
    kernels_->Step(formula, parts, scalars.to(at::kCUDA));
    scalars[kSkip] = 1;
    kernels_->Step(formula, parts, scalars.to(at::kCUDA));
    StepElements(formula, expected.Range(),
                 CoefficientsOf(c.options, 1, 1 / 3.0));
    ExpectSame(state, expected, NameOf(formula));
  }
}

}  // namespace
}  // namespace tessera
