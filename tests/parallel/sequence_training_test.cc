// An engine with sequence_parallel_size has the bits of one process that
// computes the parts of sequences in turn and adds their gradients in rank
// order. Which dimension of an input is divided is chosen without regard to
// sense: operators that have no rule for it get wholes.
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

// ---- models, each at one stage

class SequenceModelsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(SequenceModelsTest, HaveTheBitsOfOneProcess) {
  const std::vector<std::string> names = TestModelNamesForStage3();
  TrainingSpec spec;
  spec.model = GetParam();
  spec.stage = static_cast<int>(
      (std::find(names.begin(), names.end(), GetParam()) - names.begin()) % 4);
  spec.sequence = 2;
  spec.gradients = spec.outcomes = true;
  spec.clipping = 1;
  ExpectEqualsOracle(spec, 2);
}

// torch::autograd::grad with respect to a placed parameter is libtorch's error.
std::vector<std::string> Models() {
  std::vector<std::string> names = TestModelNamesForStage3();
  names.erase(std::remove(names.begin(), names.end(), "GradientPenalty"),
              names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, SequenceModelsTest,
                         ::testing::ValuesIn(Models()));

// ---- ways to train, by pairs

struct Way {
  const char* name;
  int world_size, sequence, stage;
  const char* spec;  // TrainingSpec::ToText
};

class SequenceWaysTest : public ::testing::TestWithParam<Way> {};

TEST_P(SequenceWaysTest, HaveTheBitsOfOneProcess) {
  TrainingSpec spec = TrainingSpec::FromText(GetParam().spec);
  spec.sequence = GetParam().sequence;
  spec.stage = GetParam().stage;
  spec.outcomes = true;
  spec.gradients = spec.model != "Overflows";  // NaNs have several bits
  if (spec.clipping == 0) spec.clipping = 1;   // for the norm
  ExpectEqualsOracle(spec, GetParam().world_size);
}

constexpr Way kWays[] = {
    {"Bf16Accumulated", 2, 2, 1, "model=Gpt dtype=bf16 accumulation=2"},
    {"Fp16Scaled", 2, 2, 2,
     "model=Overflows dtype=fp16 initial_scale_power=10 steps=6"},
    {"Recomputed", 2, 2, 3,
     "model=Gpt recompute=auto/full/always clipping=0x1p-2"},
    {"RecomputedProducts", 2, 2, 2, "model=Gpt recompute=auto/selective"},
    {"WithReplicas", 4, 2, 3, "model=Gpt shard_group=2 clipping=0x1p-1"},
    {"TwoByTwo", 4, 2, 3,
     "model=Gpt dtype=bf16 clipping=0x1p-1 accumulation=2"},
    {"TwoByTwoLocal", 4, 2, 1,
     "model=Gpt accumulation=2 accumulation_mode=local clipping=0x1p-1"},
    {"FourParts", 4, 4, 2, "model=Attention clipping=0x1p-1"},
    {"ThreeParts", 3, 3, 3, "model=Gpt dtype=bf16 clipping=0x1p-1"},
    {"Sgd", 2, 2, 0,
     "model=Gpt optimizer=type:'SGD',params{lr:0.1,momentum:0.9}"},
    {"Lion", 2, 2, 3,
     "model=Attention dtype=bf16 optimizer=type:'Lion',params{lr:0.01}"},
    {"Lamb", 4, 2, 2, "model=Gpt optimizer=type:'Lamb'"},
    {"Muon", 2, 2, 3, "model=Gpt optimizer=type:'Muon'"},
    {"Adafactor", 2, 2, 3, "model=Attention optimizer=type:'Adafactor'"},
    {"Adaptive", 2, 2, 1, "model=Gpt adaptive=0x1p-4"},
    {"Casts", 2, 2, 3, "model=Attention dtype=bf16 fp32_norms=1"},
    {"NarrowMasters", 2, 2, 1, "model=Attention dtype=bf16 narrow_masters=1"},
    {"Remainders", 2, 2, 3, "model=Gpt dtype=bf16 remainder_masters=1"},
    {"Weights", 4, 2, 2, "model=Gpt weights=1 accumulation=2"},
    {"Summed", 4, 2, 3, "model=Gpt reduction=sum"},
    {"Predivided", 4, 2, 1, "model=Gpt predivide=0x1p+1"},
    {"ClippedValues", 2, 2, 3, "model=Gpt clipping_value=0x1p-8"},
    {"OnDisk", 2, 2, 3,
     "model=Gpt states_on_disk=0x1p+0 parameters_in_memory=0"},
};

INSTANTIATE_TEST_SUITE_P(Pairs, SequenceWaysTest, ::testing::ValuesIn(kWays),
                         [](const auto& way) { return way.param.name; });

// ---- what is refused

TEST(SequenceRefusalTest, NamesWhatCannotBeDivided) {
  for (const auto& [spec, why] : {
           std::pair("sequence=3", "a divisor of the world size 2, got 3"),
           std::pair("sequence=2 tensor=2", "a divisor of the world size 2"),
           std::pair("sequence=2 construct_budget=100000", "ConstructSharded"),
       }) {
    EXPECT_THAT(RunOnRanks(2, "Train", spec), Each(HasSubstr(why)));
  }
}

// ---- what would train something else

TESSERA_RANK_FUNCTION(EachItsOwnSequences) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.sequence = 2;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  const absl::Status status =
      t.engine->Backward(t.model->Loss(world.rank(), /*micro_batch=*/0));
  (void)t.engine->Close();
  return status.ToString();
}

TEST(SequenceRefusalTest, RanksOfAGroupWithOtherSamplesAreTold) {
  EXPECT_THAT(RunOnRanks(2, "EachItsOwnSequences", ""),
              Each(HasSubstr("of one sequence-parallel group, have the "
                             "losses")));
}

}  // namespace
}  // namespace tessera
