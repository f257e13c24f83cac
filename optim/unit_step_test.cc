// That a step has the same bits slice by slice as at once. What the bits are:
// kernels/adamw_bits_test.cc.
#include "optim/unit_step.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/layout/layout.h"
#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "gtest/gtest.h"
#include "offload/element_format.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/kernels/block8.h"
#include "optim/step_test_util.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {
namespace {

struct Case {
  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << c.name;
  }
  const char* name;
  at::ScalarType dtype;
  at::ScalarType working;  // `dtype`: the masters are the working copy
  OptimizerOptions options;
  bool narrow_masters = false;

  bool masters_are_working() const {
    return working == dtype || narrow_masters;
  }
};

bool IsLibtorchs(const Case& c) {
  return c.options.libtorch_exact || c.options.libtorch_fused;
}

const ElementFormat kBlocks =
    ElementFormat::Blocks(kBlock8Elements, kBlock8Bytes);

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

template <typename Make>
std::vector<at::Tensor> Each(const std::vector<at::Tensor>& of,
                             const Make& make) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& t : of) made.push_back(make(t));
  return made;
}

StepTensors Copies(const StepTensors& of) {
  return {of.masters.clone(),
          Each(of.states, [](const at::Tensor& t) { return t.clone(); }),
          of.gradient.clone(),
          of.working.defined() ? of.working.clone() : at::Tensor()};
}

StepTensors Part(const StepTensors& of, Range slice) {
  const auto part = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    const Range in_tensor =
        t.scalar_type() == at::kByte ? kBlocks.InTensor(slice) : slice;
    return t.slice(0, in_tensor.begin, in_tensor.end);
  };
  return {part(of.masters), Each(of.states, part), part(of.gradient),
          part(of.working)};
}

class UnitStepTest : public ::testing::TestWithParam<Case> {
 protected:
  UnitStepTest() { torch::manual_seed(5); }
  ~UnitStepTest() override { EndUnit(); }
  void EndUnit() {
    if (flat_ != nullptr) flat_->Abandon();
    named_.clear();
  }
  void AddParameters() {
    // What lies at odd places of a storage, and one after the other.
    const at::Tensor all = Random(1400), dense = Random(65 + 640);
    for (const at::Tensor& value :
         {all.narrow(0, 3, 501), all.narrow(0, 505, 1), all.narrow(0, 507, 64),
          all.narrow(0, 639, 700), Random(128), Random(64), Random(192),
          Random(63), Random(1), dense.narrow(0, 0, 65),
          dense.narrow(0, 65, 640), Random(9001), Random(1005), Random(301)}) {
      Add(value);
    }
    if (!large_) return;
    const at::Tensor large = Random(201'000);
    Add(large.narrow(0, 0, 70'001));
    Add(large.narrow(0, 70'001, 99'990));
    Add(large.narrow(0, 170'000, 31'000));
  }
  void Add(const at::Tensor& value) {
    const auto index = static_cast<int>(named_.size());
    named_.push_back({absl::StrCat("p", index), value, index});
  }
  static at::Tensor Random(int64_t numel) {
    return torch::randn({numel}, GetParam().dtype);
  }
  // What rank `rank` of `world_size` owns of the unit.
  void MakeUnit(int rank, int world_size) {
    EndUnit();
    AddParameters();
    auto comm = std::make_shared<FakeCommunicator>(rank, world_size);
    FlatParameterOptions options;
    options.stage = Stage::Of(1);
    if (GetParam().working != GetParam().dtype) {
      options.dtype = GetParam().working;
    }
    options.narrow_masters = GetParam().narrow_masters;
    for (NamedParameter& p : named_) p.tensor.requires_grad_();
    flat_ =
        FlatParameter::Prepare("unit", named_, options, comm,
                               std::make_shared<Schedule>(ScheduleOptions()))
            .value();
    TESSERA_ASSERT_OK(flat_->Adopt());
  }
  // Only which parameters have a gradient counts.
  std::unique_ptr<FlatGradient> Gradient() {
    auto gradient = std::make_unique<FlatGradient>(
        flat_, std::vector<bool>(named_.size(), true));
    std::vector<bool> had;
    for (size_t i = 0; i < named_.size(); ++i) had.push_back(i != 5 && i != 12);
    const at::Tensor whole = gradient->Outgoing(/*predivide=*/1).value();
    const at::Tensor sums = gradient->PlaceOfSums(whole).value();
    TESSERA_EXPECT_OK(gradient->TakeSums(sums, /*divisor=*/1));
    TESSERA_EXPECT_OK(gradient->Commit(had));
    return gradient;
  }
  StepTensors RandomTensors() {
    const int64_t n = flat_->owned().numel();
    StepTensors tensors;
    tensors.masters = Random(n).to(flat_->master_dtype());
    const OptimizerOptions& options = GetParam().options;
    for (int state = 0; state < StatesOf(FormulaOf(options)).count; ++state) {
      tensors.states.push_back(Random(n).abs());
      at::Tensor& made = tensors.states.back();
      if (options.states == StateType::kBFloat16) made = made.to(at::kBFloat16);
      if (options.states == StateType::kBlock8) {
        const at::Tensor numbers = made;
        made = torch::zeros({kBlocks.BytesOf(n)}, at::kByte);
        EncodeBlock8(numbers.const_data_ptr<float>(), n,
                     StatesOf(FormulaOf(options)).states[state].non_negative,
                     made.mutable_data_ptr());
      }
    }
    tensors.gradient = Random(n);
    if (!GetParam().masters_are_working()) {
      tensors.working = tensors.masters.to(GetParam().working);
    }
    return tensors;
  }
  // Blocks of 8 bits whose scale is halved by the step, while elements come
  // that are nothing beside the old one: whoever cuts such a block loses them.
  static void MakeSteep(StepTensors* tensors) {
    if (GetParam().options.states != StateType::kBlock8) return;
    const int64_t n = tensors->gradient.numel();
    const at::Tensor comes = at::arange(n).remainder(64).ge(49).to(at::kFloat);
    tensors->gradient.copy_(comes * (10 * 0x1p-15));
    const at::Tensor numbers = 1 - comes;
    EncodeBlock8(numbers.const_data_ptr<float>(), n, /*non_negative=*/false,
                 tensors->states[0].mutable_data_ptr());
  }
  // [owned]: 1 where a parameter with a gradient lies.
  at::Tensor Stepped(const FlatGradient& gradient) {
    const at::Tensor stepped =
        torch::zeros({flat_->owned().numel()}, at::kBool);
    for (const auto& segment : flat_->segments()) {
      if (!gradient.has_gradient(static_cast<size_t>(segment.parameter))) {
        continue;
      }
      stepped
          .narrow(0, segment.range.begin - flat_->owned().begin,
                  segment.range.numel())
          .fill_(true);
    }
    return stepped;
  }
  void ExpectSameInSlices();

  bool large_ = false;
  std::vector<NamedParameter> named_;
  std::shared_ptr<FlatParameter> flat_;
};

void UnitStepTest::ExpectSameInSlices() {
  const Case& c = GetParam();
  const bool working_written = !IsLibtorchs(c) && !c.masters_are_working();
  // Neighbours with the same number, and with others.
  const std::vector<int64_t> steps = {0, 0, 0, 3, 1, 1, 1, 1, 8, 2, 2, 0, 0, 4};
  OptimizerOptions other = c.options;
  other.lr = 3e-2;
  other.weight_decay = 0;
  const std::vector<int> groups = {0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0};
  const auto gradient = Gradient();
  const UnitStep step(*flat_, gradient->has_gradient(), steps,
                      {c.options, other}, groups, /*factor=*/0.3);
  const StepTensors before = RandomTensors();
  const int64_t numel = before.masters.numel();
  const StepTensors whole = Copies(before);
  UnitStep::Counts counts;
  EXPECT_EQ(step.Apply({0, numel}, whole, &counts), working_written);
  const at::Tensor changed = whole.masters.ne(before.masters);
  const at::Tensor stepped = Stepped(*gradient);
  // Masters of 16 bits may be rounded to what they were.
  EXPECT_TRUE(at::equal(
      c.narrow_masters ? changed.logical_or(stepped) : changed, stepped));
  for (const int64_t cut : {64, 128, 192, 1024, 4096}) {
    const StepTensors cuts = Copies(before);
    for (int64_t begin = 0; begin < numel; begin += cut) {
      const Range slice = {begin, std::min(begin + cut, numel)};
      EXPECT_EQ(step.Apply(slice, Part(cuts, slice), &counts), working_written);
    }
    EXPECT_TRUE(SameBits(cuts.masters, whole.masters)) << cut;
    for (size_t i = 0; i < whole.states.size(); ++i) {
      EXPECT_TRUE(SameBits(cuts.states[i], whole.states[i])) << cut;
    }
    if (before.working.defined()) {
      EXPECT_TRUE(SameBits(cuts.working, whole.working)) << cut;
    }
  }
}

OptimizerOptions Options(Algorithm algorithm, bool libtorch_exact = false) {
  OptimizerOptions o = {.lr = 1e-2,
                        .beta1 = 0.9,
                        .beta2 = 0.98,
                        .eps = 1e-7,
                        .weight_decay = 0.3,
                        .libtorch_exact = libtorch_exact,
                        .algorithm = algorithm};
  o.momentum = 0.9;
  return o;
}
OptimizerOptions Fused(bool amsgrad) {
  OptimizerOptions o = Options(Algorithm::kAdamW);
  o.libtorch_fused = true;
  o.amsgrad = o.maximize = amsgrad;
  return o;
}
OptimizerOptions Narrow(Algorithm algorithm, StateType states) {
  OptimizerOptions o = Options(algorithm);
  o.states = states;
  return o;
}
constexpr auto kAdamW = Algorithm::kAdamW;

INSTANTIATE_TEST_SUITE_P(
    , UnitStepTest,
    ::testing::Values(
        Case{"Kernel", at::kFloat, at::kFloat, Options(kAdamW)},
        Case{"KernelBFloat16", at::kFloat, at::kBFloat16, Options(kAdamW)},
        Case{"Libtorch", at::kDouble, at::kDouble, Options(kAdamW)},
        Case{"Exact", at::kFloat, at::kFloat, Options(kAdamW, true)},
        Case{"ExactBFloat16", at::kFloat, at::kBFloat16, Options(kAdamW, true)},
        Case{"ExactDouble", at::kDouble, at::kDouble, Options(kAdamW, true)},
        Case{"Fused", at::kFloat, at::kFloat, Fused(false)},
        Case{"FusedAmsGrad", at::kFloat, at::kBFloat16, Fused(true)},
        Case{"Sgd", at::kFloat, at::kHalf, Options(Algorithm::kSgd)},
        Case{"SgdDouble", at::kDouble, at::kDouble, Options(Algorithm::kSgd)},
        Case{"RmsProp", at::kFloat, at::kFloat, Options(Algorithm::kRmsProp)},
        Case{"Lion", at::kFloat, at::kBFloat16, Options(Algorithm::kLion)},
        Case{"ScheduleFree", at::kFloat, at::kBFloat16,
             Options(Algorithm::kScheduleFree)},
        Case{"BFloat16States", at::kFloat, at::kBFloat16,
             Narrow(kAdamW, StateType::kBFloat16)},
        Case{"Block8States", at::kFloat, at::kBFloat16,
             Narrow(kAdamW, StateType::kBlock8)},
        Case{"Block8RmsProp", at::kFloat, at::kFloat,
             Narrow(Algorithm::kRmsProp, StateType::kBlock8)},
        Case{"BFloat16Masters", at::kFloat, at::kBFloat16, Options(kAdamW),
             /*narrow_masters=*/true}),
    [](const auto& info) { return info.param.name; });

// A storage may have elements of no parameter: what takes it that all have been
// written would lose them.
TEST_P(UnitStepTest, KnowsWhetherAllOfTheStoragesIsStepped) {
  const Case& c = GetParam();
  for (const int rank : {0, 2}) {  // whose part begins with one, and has none
    MakeUnit(rank, /*world_size=*/3);
    const HasGradient all(named_.size(), 1);
    HasGradient some = all;
    some[static_cast<size_t>(flat_->segments().back().parameter)] = 0;
    const std::vector<int64_t> steps(named_.size());
    const std::vector<int> groups(named_.size());
    const std::vector<OptimizerOptions> options = {GetParam().options};
    const UnitStep of_all(*flat_, all, steps, options, groups, 1);
    EXPECT_EQ(of_all.steps_all(), rank == 2);
    EXPECT_EQ(of_all.writes_elsewhere(),
              rank == 2 && !IsLibtorchs(c) &&
                  (c.dtype == at::kFloat ||
                   c.options.algorithm != Algorithm::kAdamW));
    EXPECT_FALSE(UnitStep(*flat_, some, steps, options, groups, 1).steps_all());
  }
}

TEST_P(UnitStepTest, HasTheSameBitsInSlices) {
  MakeUnit(/*rank=*/0, /*world_size=*/1);
  ExpectSameInSlices();
}

// However the threads share it. Parameters begin and end within blocks.
TEST_P(UnitStepTest, HasTheSameBitsOnAnyNumberOfThreads) {
  const int before_threads = at::get_num_threads();
  large_ = true;
  MakeUnit(/*rank=*/0, /*world_size=*/1);
  const auto gradient = Gradient();
  std::vector<int64_t> steps(named_.size());
  for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<int64_t>(i);
  const UnitStep step(*flat_, gradient->has_gradient(), steps,
                      {GetParam().options}, std::vector<int>(named_.size()),
                      /*factor=*/1);
  StepTensors before = RandomTensors();
  MakeSteep(&before);
  StepTensors one;
  for (const int threads : {1, 2, 3, 4}) {
    at::set_num_threads(threads);
    const StepTensors tensors = Copies(before);
    UnitStep::Counts counts;
    step.Apply({0, before.masters.numel()}, tensors, &counts);
    if (threads == 1) one = tensors;
    EXPECT_TRUE(SameBits(tensors.masters, one.masters)) << threads;
    for (size_t i = 0; i < one.states.size(); ++i) {
      EXPECT_TRUE(SameBits(tensors.states[i], one.states[i])) << threads;
    }
  }
  at::set_num_threads(before_threads);
}

// States of 8 bits are changed in place.
TEST_P(UnitStepTest, WritesElsewhereWhatItMakesInPlace) {
  MakeUnit(/*rank=*/2, /*world_size=*/3);
  const HasGradient all(named_.size(), 1);
  const UnitStep step(*flat_, all, std::vector<int64_t>(named_.size()),
                      {GetParam().options}, std::vector<int>(named_.size()),
                      /*factor=*/1);
  if (!step.writes_elsewhere()) GTEST_SKIP() << "libtorch's operators";
  const StepTensors before = RandomTensors();
  const StepTensors in_place = Copies(before), old = Copies(before);
  StepTensors elsewhere = Copies(before), from = old;
  from.new_masters = elsewhere.masters.fill_(7);
  for (size_t i = 0; i < old.states.size(); ++i) {
    const bool in_place =
        old.states[i].scalar_type() == at::kByte || i >= step.num_states();
    if (in_place) elsewhere.states[i] = old.states[i];
    if (i >= step.num_states()) continue;
    from.new_states.push_back(in_place ? at::Tensor()
                                       : elsewhere.states[i].fill_(7));
  }
  from.past_caches = true;
  UnitStep::Counts counts;
  step.Apply({0, before.masters.numel()}, in_place, &counts);
  const bool rounded = step.Apply({0, before.masters.numel()}, from, &counts);
  EXPECT_TRUE(SameBits(old.masters, before.masters));
  for (size_t i = 0; i < old.states.size(); ++i) {
    EXPECT_EQ(SameBits(old.states[i], before.states[i]),
              i < step.num_states() && from.new_states[i].defined());
  }
  elsewhere.working = old.working;
  for (const auto& segment : flat_->segments()) {  // without gaps
    const int64_t first = flat_->owned().begin;
    const Range range{segment.range.begin - first, segment.range.end - first};
    const StepTensors a = Part(elsewhere, range), b = Part(in_place, range);
    EXPECT_TRUE(SameBits(a.masters, b.masters));
    for (size_t i = 0; i < a.states.size(); ++i) {
      EXPECT_TRUE(SameBits(a.states[i], b.states[i]));
    }
    if (rounded) EXPECT_TRUE(SameBits(a.working, b.working));
  }
}

// Which begins and ends within parameters.
TEST_P(UnitStepTest, HasTheSameBitsInSlicesOfAShard) {
  for (const int rank : {0, 1, 2}) {
    MakeUnit(rank, /*world_size=*/3);
    ExpectSameInSlices();
  }
}

}  // namespace
}  // namespace tessera
