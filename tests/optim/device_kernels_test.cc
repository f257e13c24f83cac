// Tests DeviceKernels on the device without hardware: they have the CPU's bits,
// run on the right stream, declare all that they read and write, and the host
// does not wait.
#include "optim/device_kernels.h"

#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "optim/cuda/step_testing.h"
#include "optim/norm/grad_norm.h"
#include "optim/unit_step.h"
#include "testing/device/test_device.h"
#include "tests/support/device_kernels.h"
#include "torch/csrc/autograd/engine.h"
#include "verify/oracle_step.h"
#include "verify/plain/plain_autograd.h"

namespace tessera {
namespace {

using testdevice::Mode;
using testdevice::TestDevice;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(kType);
}

class DeviceKernelsTest : public ::testing::TestWithParam<Mode> {
 protected:
  static void SetUpTestSuite() {
    testdevice::Register({});
    RegisterTestDeviceKernels();
    RegisterTestDeviceKernels();
  }
  void SetUp() override {
    testdevice::SetMode(GetParam(), 1);
    testdevice::ClearFaults();
    testdevice::ResetHostWaits();
    torch::manual_seed(1);
  }
  void TearDown() override { testdevice::SetMode(Mode::kAtOnce); }
  static const DeviceKernels& Kernels() { return *DeviceKernelsOf(kType); }
};

INSTANTIATE_TEST_SUITE_P(Modes, DeviceKernelsTest,
                         ::testing::Values(Mode::kAtOnce, Mode::kWorkers),
                         [](const auto& info) {
                           return info.param == Mode::kAtOnce ? "AtOnce"
                                                              : "Workers";
                         });

void ExpectSameBits(const at::Tensor& of_device, const at::Tensor& expected,
                    const std::string& what) {
  const at::Tensor got = of_device.cpu();
  EXPECT_TRUE(got.nbytes() == expected.nbytes() &&
              std::memcmp(got.const_data_ptr(), expected.const_data_ptr(),
                          got.nbytes()) == 0)
      << what;
}

void ExpectNoFaults() {
  for (const testdevice::Fault& fault : testdevice::Faults()) {
    ADD_FAILURE() << fault.message;
  }
}

// ---- the norm

at::Tensor Sums(int64_t ranks, c10::Device device) {
  return torch::zeros({ranks * kNormWords},
                      at::TensorOptions(at::kLong).device(device));
}
at::Tensor Scalars(c10::Device device) {
  return torch::empty({kStepScalars},
                      at::TensorOptions(at::kDouble).device(device));
}

TEST_P(DeviceKernelsTest, NormHasTheCpusBits) {
  constexpr int64_t kRanks = 3;
  // The tensors are on another device than the current one.
  const c10::Device device = TestDevice(1);
  for (const double p : {1.0, 2.0, kInfinity}) {
    NormSum expected(p);
    const at::Tensor all = Sums(kRanks, device);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const at::Tensor sum = all.narrow(0, rank * kNormWords, kNormWords);
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf,
                               at::kBFloat16, at::kComplexFloat}) {
        if (!Kernels().HasNorm(p, dtype)) continue;
        for (const int64_t numel : {0, 1, 3000}) {
          const at::Tensor x = torch::randn({numel}).to(dtype);
          expected.Add(x, 29);
          Kernels().AddToNorm({{x.to(device), 29}}, p, sum);
        }
      }
    }
    const at::Tensor scalars = Scalars(device);
    testdevice::ResetHostWaits();
    Kernels().FinishNorm(all, {p, kRanks, 3, 0.5, true}, scalars);
    EXPECT_EQ(testdevice::CountHostWaits(), 0);
    const double norm = expected.Norm() * (1 / 3.0);
    const double clip = ClipCoefficient(norm, 0.5);
    ExpectSameBits(
        scalars,
        torch::tensor({(1 / 3.0) * clip, 0.0, norm, norm * clip, 0.0},
                      at::kDouble),
        HexFloat(p));
  }
  ExpectNoFaults();
}

// A launch for each dtype and 96 parts.
TEST_P(DeviceKernelsTest, TakeManyPartsOfANormAtOnce) {
  const c10::Device device = TestDevice(0);
  NormSum expected(2);
  std::vector<NormPart> parts;
  for (int64_t i = 0; i < 300; ++i) {
    const at::Tensor x =
        torch::randn({i}).to(i % 3 == 0 ? at::kBFloat16 : at::kFloat);
    expected.Add(x, i);
    parts.push_back({x.to(device), i});
  }
  const at::Tensor sum = Sums(1, device), scalars = Scalars(device);
  const int64_t before = testdevice::CountLaunches("AddToNorm");
  Kernels().AddToNorm(parts, 2, sum);
  EXPECT_EQ(testdevice::CountLaunches("AddToNorm") - before, 3 + 2);
  Kernels().FinishNorm(sum, {}, scalars);
  EXPECT_EQ(scalars[kGradNorm].item<double>(), expected.Norm());
  ExpectNoFaults();
}

TEST_P(DeviceKernelsTest, SkipsOverflowsAndFindsOtherReplicas) {
  const c10::Device device = TestDevice(0);
  const at::Tensor all = Sums(4, device);
  const at::Tensor x = torch::ones({10}, device);
  x[3] = kInfinity;
  for (const int64_t rank : {0, 2}) {
    Kernels().AddToNorm({{x, 0}}, 2,
                        all.narrow(0, rank * kNormWords, kNormWords));
  }
  const at::Tensor scalars = Scalars(device);
  Kernels().FinishNorm(all, {.group_size = 2, .skip_on_overflow = true},
                       scalars);
  EXPECT_EQ(scalars[kSkip].item<double>(), 1);
  EXPECT_EQ(scalars[kGradNorm].item<double>(), kInfinity);
  EXPECT_EQ(scalars[kReplicasDiffer].item<double>(), 0);
  Kernels().AddToNorm({{torch::ones({1}, device), 0}}, 2,
                      all.narrow(0, 3 * kNormWords, kNormWords));
  Kernels().FinishNorm(all, {.group_size = 2}, scalars);
  EXPECT_EQ(scalars[kSkip].item<double>(), 0);
  EXPECT_EQ(scalars[kReplicasDiffer].item<double>(), 3);
  ExpectNoFaults();
}

TEST_P(DeviceKernelsTest, SaysWhatItHas) {
  EXPECT_TRUE(Kernels().HasNorm(2, at::kComplexDouble));
  EXPECT_FALSE(Kernels().HasNorm(1, at::kComplexDouble));
  EXPECT_FALSE(Kernels().HasNorm(3, at::kFloat));
  EXPECT_FALSE(Kernels().HasNorm(1.5, at::kFloat));
}

// ---- steps

at::Tensor Normal(int64_t numel) { return torch::randn({numel}); }

void ExpectSame(StepOperands of_device, StepOperands expected) {
  const auto all = of_device.All(), others = expected.All();
  for (size_t i = 0; i < all.size(); ++i) {
    ExpectSameBits(*all[i], *others[i], absl::StrCat("tensor ", i).c_str());
  }
}

at::Tensor ScalarsOf(double factor, bool skip, c10::Device device) {
  return torch::tensor({factor, skip ? 1.0 : 0.0, 0.0, 0.0, 0.0}, at::kDouble)
      .to(device);
}

constexpr NumberType kTypes[] = {NumberType::kNone, NumberType::kFloat32,
                                 NumberType::kBFloat16, NumberType::kFloat16};

// Returns the types of memory, by working copies and states.
std::vector<StepTypes> MemoryTypes() {
  std::vector<StepTypes> all;
  for (const NumberType working : kTypes) {
    for (const NumberType states :
         {NumberType::kFloat32, NumberType::kBFloat16, NumberType::kBlock8}) {
      all.push_back({working, states});
    }
  }
  for (const NumberType masters :
       {NumberType::kBFloat16, NumberType::kFloat16}) {
    all.push_back({NumberType::kNone, NumberType::kFloat32, masters, masters});
  }
  all.push_back({NumberType::kBFloat16, NumberType::kFloat32,
                 NumberType::kBFloat16, NumberType::kRemainder});
  return all;
}

constexpr Formula kFormula = Formula::kAdamW;

void StepOnDevice(const StepOperands& m, const StepCoefficients& c,
                  const at::Tensor& scalars) {
  const StepPart part = {m.Range(), c};
  DeviceKernelsOf(kType)->Step(kFormula, {part}, scalars);
}

TEST_P(DeviceKernelsTest, StepHasTheCpusBits) {
  const OptimizerOptions options = {.lr = 1e-2, .weight_decay = 0.1};
  const c10::Device device = TestDevice(1);
  for (const StepTypes& types : MemoryTypes()) {
    for (const int64_t numel : {1, 1000}) {
      StepOperands expected(kFormula, numel, types, Normal);
      const StepOperands state = expected.To(device);
      const at::Tensor scalars = ScalarsOf(0.37, false, device);
      const at::Tensor skip = ScalarsOf(0.37, true, device);
      testdevice::ResetHostWaits();
      StepOnDevice(state, CoefficientsOf(options, 1, 0.2), {});
      StepOnDevice(state, CoefficientsOf(options, 2, 0.2), scalars);
      StepOnDevice(state, CoefficientsOf(options, 3, 0.2), skip);
      EXPECT_EQ(testdevice::CountHostWaits(), 0);
      StepElements(kFormula, expected.Range(), CoefficientsOf(options, 1, 0.2));
      StepElements(kFormula, expected.Range(),
                   CoefficientsOf(options, 2, 0.37));
      ExpectSame(state, expected);
    }
  }
  ExpectNoFaults();
}

// ---- what they declare

// Whether a fault is found where a kernel comes on a side stream without a wait
// for what the default stream does with `t`.
bool IsFault(const std::function<void()>& before,
             const std::function<void()>& kernel) {
  const c10::Device device = TestDevice(0);
  const c10::Stream side = Impl().getStreamFromGlobalPool(device);
  c10::Event event(kType);
  event.record(Impl().getStream(device));
  event.block(side);
  testdevice::ClearFaults();
  before();
  {
    const c10::Stream own = Impl().exchangeStream(side);
    kernel();
    Impl().exchangeStream(own);
  }
  Impl().synchronizeDevice(device.index());
  const bool found = !testdevice::Faults().empty();
  testdevice::ClearFaults();
  return found;
}

void ExpectDeclared(const std::vector<at::Tensor>& written,
                    const std::vector<at::Tensor>& read,
                    const std::function<void()>& kernel) {
  EXPECT_FALSE(IsFault([] {}, kernel));
  for (size_t i = 0; i < written.size(); ++i) {
    EXPECT_TRUE(IsFault([&] { written[i].clone(); }, kernel)) << i;
    EXPECT_TRUE(IsFault([&] { written[i].zero_(); }, kernel)) << i;
  }
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_FALSE(IsFault([&] { read[i].clone(); }, kernel)) << i;
    EXPECT_TRUE(IsFault([&] { read[i].zero_(); }, kernel)) << i;
    // The whole range is declared.
    const at::Tensor last = read[i].narrow(0, read[i].numel() - 1, 1);
    EXPECT_TRUE(IsFault([&] { last.zero_(); }, kernel)) << i;
  }
}

TEST_P(DeviceKernelsTest, DeclareWhatTheyReadAndWrite) {
  const c10::Device device = TestDevice(0);
  const at::Tensor x = torch::ones({100}, device);
  const at::Tensor sum = Sums(1, device), scalars = Scalars(device).zero_();
  ExpectDeclared({sum}, {x}, [&] { Kernels().AddToNorm({{x, 0}}, 2, sum); });
  ExpectDeclared({scalars}, {sum},
                 [&] { Kernels().FinishNorm(sum, {}, scalars); });
  for (const StepTypes& types : MemoryTypes()) {
    const StepOperands s =
        StepOperands(kFormula, 100, types, Normal).To(device);
    std::vector<at::Tensor> written = {s.master, s.states[0], s.states[1]};
    if (types.working != NumberType::kNone) written.push_back(s.working);
    ExpectDeclared(written, {s.gradient, scalars},
                   [&] { StepOnDevice(s, CoefficientsOf({}, 1), scalars); });
    EXPECT_FALSE(IsFault([&] { scalars.zero_(); },
                         [&] { StepOnDevice(s, CoefficientsOf({}, 1), {}); }));
  }
}

// ---- which arithmetic a step has

// Each type of device is tested, with Tessera's kernels and without: no GPU is
// needed to see that the oracle computes there what the engine does.
TEST(StepChoice, TheOraclesIsTheEngines) {
  testdevice::Register({});
  RegisterTestDeviceKernels();
  const DeviceKernels* const some = DeviceKernelsOf(kType);
  ASSERT_TRUE(IsPlainAdamW(OracleStepOptions()));
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    const DeviceKernels* const own = DeviceKernelsOf(type);
    for (const bool has : {true, false}) {
      const DeviceKernels* const kernels = has ? some : nullptr;
      RegisterDeviceKernels(type, kernels);
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        SCOPED_TRACE(absl::StrCat(c10::DeviceTypeName(type), " ",
                                  c10::toString(dtype),
                                  has ? " with kernels" : ""));
        const bool by_formula =
            dtype == at::kFloat && (type == c10::DeviceType::CPU || has);
        EXPECT_EQ(IsForKernel(type, dtype, {OptimizerOptions()}), by_formula);
        EXPECT_EQ(OracleCallsFusedAdamW(type, dtype, OracleStepOptions()),
                  !by_formula);
      }
    }
    RegisterDeviceKernels(type, own);
  }
}

// ---- plain training beside which engines are compared

// libtorch's device threads are those of the autograd engine that came first,
// here ours.
TEST(PlainAutograd, ComputesOnADeviceWhicheverEngineCameFirst) {
  testdevice::Register({});
  InstallSavedTensorHooks();
  torch::autograd::Engine::get_default_engine();
  for (const bool plainly : {true, false}) {
    std::unique_ptr<PlainAutograd> plain;
    if (plainly) plain = std::make_unique<PlainAutograd>();
    const at::Tensor w = torch::ones({8}, TestDevice(0)).requires_grad_(true);
    (w * w).sum().backward();
    ExpectSameBits(w.grad(), at::full({8}, 2.f), plainly ? "plain" : "ours");
  }
}

}  // namespace
}  // namespace tessera
