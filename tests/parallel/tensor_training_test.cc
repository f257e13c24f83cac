// An engine whose layers are divided over the ranks of a tensor-parallel group
// has the bits of one process that computes the parts in turn and adds in rank
// order. What is divided, and along what, is chosen without regard to sense:
// operators that have no rule for it get wholes.
#include <algorithm>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TrainingSpec Divided(const std::string& model, int stage, int cuts = 0) {
  TrainingSpec spec;
  spec.model = model;
  spec.stage = stage;
  spec.tensor = 2;
  spec.cuts = cuts;
  spec.gradients = true;
  spec.outcomes = true;
  spec.clipping = 1;
  return spec;
}

// ---- models, each at one stage

class TensorModelsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(TensorModelsTest, HaveTheBitsOfOneProcess) {
  const std::vector<std::string> names = TestModelNamesForStage3();
  const auto number =
      std::find(names.begin(), names.end(), GetParam()) - names.begin();
  const int stage = static_cast<int>(number) % 4;
  ExpectEqualsOracle(Divided(GetParam(), stage, static_cast<int>(number) % 3),
                     2);
}

// Inputs are divided beside parameters.
TEST_P(TensorModelsTest, HaveThemWithPartsOfInputs) {
  const std::vector<std::string> names = TestModelNamesForStage3();
  const auto number =
      std::find(names.begin(), names.end(), GetParam()) - names.begin();
  ExpectEqualsOracle(
      Divided("Divided:" + GetParam(), static_cast<int>(number + 3) % 4,
              static_cast<int>(number) % 3),
      2);
}

INSTANTIATE_TEST_SUITE_P(All, TensorModelsTest,
                         ::testing::ValuesIn(TestModelNamesForStage3()));

// ---- ways to train, by pairs

struct Way {
  const char* name;
  int world_size, tensor, stage, cuts;
  const char* spec;  // TrainingSpec::ToText
};

class TensorWaysTest : public ::testing::TestWithParam<Way> {};

TEST_P(TensorWaysTest, HaveTheBitsOfOneProcess) {
  TrainingSpec spec = TrainingSpec::FromText(GetParam().spec);
  spec.tensor = GetParam().tensor;
  spec.stage = GetParam().stage;
  spec.cuts = GetParam().cuts;
  spec.gradients = spec.outcomes = true;
  if (spec.clipping == 0) spec.clipping = 1;  // for the norm
  ExpectEqualsOracle(spec, GetParam().world_size);
}

constexpr Way kWays[] = {
    {"Bf16Accumulated", 2, 2, 1, 0, "model=Gpt dtype=bf16 accumulation=2"},
    {"Fp16Scaled", 2, 2, 2, 1,
     "model=Overflows dtype=fp16 initial_scale_power=10 steps=6"},
    {"Recomputed", 2, 2, 3, 0,
     "model=Gpt recompute=auto/full/always clipping=0x1p-2"},
    {"RecomputedProducts", 2, 2, 2, 2, "model=Gpt recompute=auto/selective"},
    {"WithReplicas", 4, 2, 3, 0, "model=Gpt shard_group=1 clipping=0x1p-1"},
    {"TwoByTwo", 4, 2, 3, 1,
     "model=Gpt dtype=bf16 clipping=0x1p-1 accumulation=2"},
    {"TwoByTwoLocal", 4, 2, 1, 2,
     "model=Gpt accumulation=2 accumulation_mode=local clipping=0x1p-1"},
    {"FourParts", 4, 4, 2, 0, "model=Attention clipping=0x1p-1"},
    {"ThreeParts", 3, 3, 3, 0, "model=Gpt dtype=bf16 clipping=0x1p-1"},
    {"Sgd", 2, 2, 0, 0,
     "model=Gpt optimizer=type:'SGD',params{lr:0.1,momentum:0.9}"},
    {"Lion", 2, 2, 3, 2,
     "model=Attention dtype=bf16 optimizer=type:'Lion',params{lr:0.01}"},
    {"Casts", 2, 2, 3, 1, "model=Attention dtype=bf16 fp32_norms=1"},
    {"NarrowMasters", 2, 2, 1, 1,
     "model=Attention dtype=bf16 narrow_masters=1"},
    {"Remainders", 2, 2, 3, 0, "model=Gpt dtype=bf16 remainder_masters=1"},
    {"Weights", 4, 2, 2, 0, "model=Gpt weights=1 accumulation=2"},
    {"ClippedValues", 2, 2, 3, 1, "model=Gpt clipping_value=0x1p-8"},
    {"OnDisk", 2, 2, 3, 0,
     "model=Gpt states_on_disk=0x1p+0 parameters_in_memory=0"},
};

INSTANTIATE_TEST_SUITE_P(Pairs, TensorWaysTest, ::testing::ValuesIn(kWays),
                         [](const auto& way) { return way.param.name; });

// ---- what is refused

struct Refused {
  const char* spec;
  const char* why;
};

TEST(TensorRefusalTest, NamesWhatCannotBeDivided) {
  for (const Refused& refused : {
           Refused{"tensor=2 optimizer=type:'Lamb'", "optimizer Lamb"},
           Refused{"tensor=2 optimizer=type:'Adafactor'", "Adafactor"},
           Refused{"tensor=2 adaptive=0x1p-4", "adaptive_gradient_clipping"},
           Refused{"tensor=3", "a divisor of the world size 2, got 3"},
           Refused{"tensor=2 construct_budget=100000", "ConstructSharded"},
       }) {
    EXPECT_THAT(RunOnRanks(2, "Train", refused.spec),
                Each(HasSubstr(refused.why)));
  }
}

// ---- what would train something else

TESSERA_RANK_FUNCTION(EachItsOwnSamples) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(Divided("Gpt", 1), world.communicator()));
  const absl::Status status =
      t.engine->Backward(t.model->Loss(world.rank(), /*micro_batch=*/0));
  (void)t.engine->Close();
  return status.ToString();
}

TEST(TensorRefusalTest, RanksOfAGroupWithOtherSamplesAreTold) {
  EXPECT_THAT(RunOnRanks(2, "EachItsOwnSamples", ""),
              Each(HasSubstr("have the losses")));
}

}  // namespace
}  // namespace tessera
