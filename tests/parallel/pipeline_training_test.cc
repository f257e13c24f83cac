// An engine whose layers lie on the stages of a pipeline has the bits of one
// without: those of the oracle, over the ranks of a stage.
#include <algorithm>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

TrainingSpec Staged(const std::string& model, int stage) {
  TrainingSpec spec;
  spec.model = model;
  spec.stage = stage;
  spec.pipeline = 2;
  spec.accumulation = 3;
  spec.gradients = true;
  spec.outcomes = true;
  spec.clipping = 1;
  return spec;
}

// ---- models, each at one stage of ZeRO

class PipelineModelsTest : public ::testing::TestWithParam<std::string> {};

// One takes gradients within its forward, or has regions that are recomputed
// across a border (below, in other ways to train); others write parameters in
// their forward or have several in one memory (refused:
// pipeline_calls_test.cc); one has a single parameter.
std::vector<std::string> Models() {
  std::vector<std::string> names;
  for (const std::string& name : TestModelNamesForStage3()) {
    const bool other = name == "GradientPenalty" || name == "Clamped" ||
                       name == "SharedStorage" || name == "Views" ||
                       name == "Checkpointing";
    if (!other) names.push_back(name);
  }
  return names;
}

TEST_P(PipelineModelsTest, HaveTheBitsOfOneWithout) {
  const std::vector<std::string> names = Models();
  const auto number =
      std::find(names.begin(), names.end(), GetParam()) - names.begin();
  ExpectEqualsOracle(Staged(GetParam(), static_cast<int>(number) % 4), 2);
}

INSTANTIATE_TEST_SUITE_P(All, PipelineModelsTest,
                         ::testing::ValuesIn(Models()));

// ---- ways to train, by pairs

struct Way {
  const char* name;
  int world_size, pipeline, stage;
  const char* spec;  // TrainingSpec::ToText
};

class PipelineWaysTest : public ::testing::TestWithParam<Way> {};

TEST_P(PipelineWaysTest, HaveTheBitsOfOneWithout) {
  TrainingSpec spec = TrainingSpec::FromText(GetParam().spec);
  spec.pipeline = GetParam().pipeline;
  spec.stage = GetParam().stage;
  spec.outcomes = true;
  spec.gradients = spec.model != "Overflows";  // NaNs have several bits
  if (spec.accumulation == 1) spec.accumulation = 4;
  if (spec.clipping == 0) spec.clipping = 1;  // for the norm
  ExpectEqualsOracle(spec, GetParam().world_size);
}

constexpr Way kWays[] = {
    {"Bf16", 2, 2, 1, "model=Gpt dtype=bf16"},
    {"CastInputs", 2, 2, 3, "model=Mlp dtype=bf16"},
    {"CastInputsNorms", 2, 2, 2, "model=Gpt dtype=bf16 fp32_norms=1"},
    {"Fp16Scaled", 2, 2, 2,
     "model=Overflows dtype=fp16 initial_scale_power=10 steps=6"},
    {"Fp16", 2, 2, 2, "model=Gpt dtype=fp16 initial_scale_power=10"},
    {"Recomputed", 2, 2, 3,
     "model=Gpt recompute=auto/full/always clipping=0x1p-2"},
    {"RecomputedProducts", 2, 2, 2, "model=Gpt recompute=auto/selective"},
    {"ThreeStages", 3, 3, 3, "model=Gpt clipping=0x1p-1"},
    {"FourStages", 4, 4, 0, "model=Gpt dtype=bf16 clipping=0x1p-1"},
    {"TwoByTwo", 4, 2, 3, "model=Gpt dtype=bf16 clipping=0x1p-1"},
    {"TwoByTwoLocal", 4, 2, 1,
     "model=Gpt accumulation_mode=local clipping=0x1p-1"},
    {"WithReplicas", 4, 2, 3, "model=Gpt shard_group=1 clipping=0x1p-1"},
    {"GPipe", 2, 2, 2, "model=Gpt schedule=gpipe"},
    {"AgainstTheDirection", 2, 2, 3, "model=GradientPenalty schedule=gpipe"},
    {"Checkpointed", 2, 2, 1, "model=Checkpointing split=out"},
    {"FewMicroBatches", 3, 3, 1, "model=Gpt accumulation=2"},
    {"Sgd", 2, 2, 0,
     "model=Gpt optimizer=type:'SGD',params{lr:0.1,momentum:0.9}"},
    {"Lion", 2, 2, 3,
     "model=Attention dtype=bf16 optimizer=type:'Lion',params{lr:0.01}"},
    {"Lamb", 2, 2, 2, "model=Attention optimizer=type:'Lamb',params{lr:0.01}"},
    {"Muon", 2, 2, 3, "model=Attention optimizer=type:'Muon',params{lr:0.01}"},
    {"NarrowMasters", 2, 2, 1, "model=Attention dtype=bf16 narrow_masters=1"},
    {"Remainders", 2, 2, 3, "model=Gpt dtype=bf16 remainder_masters=1"},
    {"Weights", 4, 2, 2, "model=Gpt weights=1"},
    {"ClippedValues", 2, 2, 3, "model=Gpt clipping_value=0x1p-8"},
    {"OnDisk", 2, 2, 3,
     "model=Gpt states_on_disk=0x1p+0 parameters_in_memory=0"},
};

INSTANTIATE_TEST_SUITE_P(Pairs, PipelineWaysTest, ::testing::ValuesIn(kWays),
                         [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace tessera
