// Tests that it does not change the result when units come and go at stage 3:
// every loop gives the oracle's bits, whatever the order of forwards, backwards
// and steps, and keeps the limit of whole units.
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// ---- loops, under schedules that differ

const char* const kLoops[] = {"Recomputing",  "GradientPenalty", "Evaluating",
                              "ChangingPath", "TwoForwards",     "Gpt"};

// The parameter is an index of kLoops.
class LoopTest : public ::testing::TestWithParam<int> {
 protected:
  LoopTest() {
    spec_.model = kLoops[GetParam()];
    spec_.steps = 8;
    spec_.poison = true;
  }
  // Whether this loop runs a cell: half of a test's cells, with every pair of
  // values, and the next loop runs the others. `sum` is of their indices.
  bool Runs(int sum) const { return (sum + GetParam()) % 2 == 0; }
  TrainingSpec spec_;
};

TEST_P(LoopTest, AtEveryStage) {
  for (int stage : {0, 1, 2, 3}) {
    spec_.stage = stage;
    for (int world_size : {1, 2, 3}) {
      if (Runs(stage + world_size)) ExpectEqualsOracle(spec_, world_size);
    }
  }
}

TEST_P(LoopTest, WhateverIsGatheredAhead) {
  spec_.stage = 3;
  spec_.shared = "off";
  spec_.max_reuse_distance = 0;
  for (int64_t prefetch : {0, 1, 700, 100000}) {
    spec_.prefetch_bucket_size = prefetch;
    spec_.overlap = prefetch > 0;
    ExpectEqualsOracle(spec_, 2);
  }
}

TEST_P(LoopTest, WhateverStaysWhole) {
  spec_.stage = 3;
  spec_.shared = "off";
  spec_.accumulation = 2;
  int cell = 0;
  for (int64_t max_live : {0, 1, 700, 2000}) {
    spec_.max_live_parameters = max_live;
    spec_.max_reuse_distance = Runs(cell++) ? 0 : 100000;
    ExpectEqualsOracle(spec_, 2);
  }
}

TEST_P(LoopTest, WhateverIsKeptForBackward) {
  spec_.stage = 3;
  spec_.shared = "off";
  spec_.reshard = "false";
  for (int64_t max_live : {700, 100000}) {
    spec_.max_live_parameters = max_live;
    for (int world_size : {2, 3}) ExpectEqualsOracle(spec_, world_size);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LoopTest, ::testing::Range(0, 6),
                         [](const auto& info) {
                           return std::string(kLoops[info.param]);
                         });

// ---- the engine's own calls

std::vector<std::string> UnitNames(const Engine& engine) {
  std::vector<std::string> names;
  for (const std::string& line : engine.DescribeUnits()) {
    names.push_back(line.substr(0, line.find(':')));
  }
  return names;
}

// Returns the units that unit `u` of `n` is to have gathered ahead, in turn:
// the next one, the one before, all, itself, none.
std::vector<std::string> ListOf(const std::vector<std::string>& units, size_t u,
                                int turn) {
  switch (turn % 5) {
    case 0:
      return {units[(u + 1) % units.size()]};
    case 1:
      return {units[(u + units.size() - 1) % units.size()]};
    case 2:
      return units;
    case 3:
      return {units[u]};
    default:
      return {};
  }
}

// Every step has other lists.
TESSERA_RANK_FUNCTION(TrainWithLists) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  const std::vector<std::string> units = UnitNames(*t.engine);
  for (int step = 0; step < spec.steps; ++step) {
    for (size_t u = 0; u < units.size(); ++u) {
      TESSERA_RETURN_IF_ERROR(t.engine->SetPrefetch(
          units[u], Engine::Pass::kForward, ListOf(units, u, step)));
      TESSERA_RETURN_IF_ERROR(t.engine->SetPrefetch(
          units[u], Engine::Pass::kBackward, ListOf(units, u, step + 1)));
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

// Every step another unit is kept for backward.
TESSERA_RANK_FUNCTION(TrainWithKeptUnits) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  const std::vector<std::string> units = UnitNames(*t.engine);
  for (int step = 0; step < spec.steps; ++step) {
    for (size_t u = 0; u < units.size(); ++u) {
      TESSERA_RETURN_IF_ERROR(t.engine->SetReshardAfterForward(
          units[u], (u + static_cast<size_t>(step)) % 3 != 0));
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TESSERA_RANK_FUNCTION(NameUnitsThatAreNone) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  const std::string unit = UnitNames(*t.engine).front();
  const auto kForward = Engine::Pass::kForward;
  const std::string text = absl::StrCat(
      t.engine->SetPrefetch("one", kForward, {}).ToString(), "; ",
      t.engine->SetPrefetch(unit, kForward, {unit, "two"}).ToString(), "; ",
      t.engine->SetReshardAfterForward("three", true).ToString());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return text;
}

TESSERA_RANK_FUNCTION(DescribedUnits) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  const std::vector<std::string> units = t.engine->DescribeUnits();
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrJoin(units, "\n");
}

// Two losses, a Backward each, before every Step.
TESSERA_RANK_FUNCTION(TwoLosses) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  for (int i = 0; i < spec.steps * spec.accumulation; ++i) {
    const at::Tensor first = t.Loss(2 * i), second = t.Loss(2 * i + 1);
    BackwardOptions of_first;
    of_first.more_losses = true;
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(first, of_first));
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(second));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
    const int64_t expected = (i + 1) / spec.accumulation;
    if (t.engine->step() == expected) continue;
    return absl::InternalError(absl::StrCat("after ", i + 1, " calls of Step ",
                                            t.engine->step(), " were made"));
  }
  return t.Finish();
}

class ScheduleTest : public ::testing::TestWithParam<int> {
 protected:
  ScheduleTest() { spec_.stage = GetParam(); }
  TrainingSpec spec_;
};

TEST_P(ScheduleTest, ExplicitPrefetchListsGiveTheSameBits) {
  spec_.model = "Gpt";
  spec_.steps = 7;
  spec_.poison = true;
  int cell = GetParam();
  for (int64_t max_live : {0, 3000, 1000000}) {
    spec_.max_live_parameters = max_live;
    spec_.param_persistence_threshold = max_live == 3000 ? 20 : 0;
    for (int world_size : {1, 2, 3}) {
      // Half of the cells, and at the next stage the other half.
      if (++cell % 2 == 0) continue;
      ExpectParameters(RunOnRanks(world_size, "TrainWithLists", spec_.ToText()),
                       spec_, world_size,
                       std::vector<Oracle::Loss>(7, OwnLoss()));
    }
  }
}

TEST_P(ScheduleTest, UnitsKeptForBackwardGiveTheSameBits) {
  spec_.model = "Gpt";
  spec_.steps = 5;
  spec_.poison = true;
  spec_.max_reuse_distance = 0;
  for (int world_size : {1, 2, 3}) {
    ExpectParameters(
        RunOnRanks(world_size, "TrainWithKeptUnits", spec_.ToText()), spec_,
        world_size, std::vector<Oracle::Loss>(5, OwnLoss()));
  }
}

TEST_P(ScheduleTest, UnitsThatAreNoneAreNamed) {
  EXPECT_THAT(RunOnRanks(2, "NameUnitsThatAreNone", spec_.ToText()),
              Each(AllOf(HasSubstr("NOT_FOUND: there is no unit 'one'"),
                         HasSubstr("NOT_FOUND: there is no unit 'two'"),
                         HasSubstr("NOT_FOUND: there is no unit 'three'"),
                         HasSubstr("DescribeUnits"))));
}

TEST(UnitsTest, AreDescribedWithWhatTheirNamesDoNotSay) {
  TrainingSpec spec;
  spec.model = "Gpt";
  EXPECT_EQ(RunOnRanks(1, "DescribedUnits", spec.ToText())[0],
            "places: 2 parameters, 532 elements (with tokens.weight)\n"
            "blocks.0: 12 parameters, 2534 elements\n"
            "blocks.1: 12 parameters, 2534 elements\n"
            "norm.weight: 2 parameters, 28 elements (with norm.bias)");
}

// All that is backwarded before a Step is one micro-batch, if it is said so:
// each loss is divided by the accumulation count, and the sum counts once.
TEST_P(ScheduleTest, SeveralBackwardsBeforeOneStepAreOneMicroBatch) {
  // The oracle has each loss as a micro-batch, of half its weight; doubling
  // before is exact.
  const Oracle::Loss twice = [](torch::nn::Module& module, int rank,
                                int64_t micro_batch) {
    return OwnLoss()(module, rank, micro_batch) * 2;
  };
  for (int accumulation : {1, 2}) {
    spec_.accumulation = accumulation;
    TrainingSpec of_oracle = spec_;
    of_oracle.accumulation = 2 * accumulation;
    ExpectParameters(RunOnRanks(2, "TwoLosses", spec_.ToText()), of_oracle, 2,
                     {twice, twice, twice});
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScheduleTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// ---- max_live_parameters

// Returns the number of elements of each unit's flat buffer.
std::vector<int64_t> UnitNumels(const torch::nn::Module& module) {
  std::vector<int64_t> numels;
  std::vector<const FlatParameter*> seen;
  for (const at::Tensor& p : module.parameters()) {
    const FlatParameter* const unit = Registry::Global().Find(p).flat.get();
    if (std::find(seen.begin(), seen.end(), unit) != seen.end()) continue;
    seen.push_back(unit);
    numels.push_back(unit->layout().whole_numel());
  }
  return numels;
}

// "<elements of the largest unit> <of all> <most bytes gathered at a time>".
TESSERA_RANK_FUNCTION(MostGathered) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  int64_t largest = 0, all = 0;
  for (int64_t numel : UnitNumels(*t.model)) {
    largest = std::max(largest, numel);
    all += numel;
  }
  MemoryLedger::Host().ResetPeak();
  for (int step = 0; step < spec.steps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  const MemoryReport report = MemoryLedger::Host().Report();
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(largest, " ", all, " ",
                      report[MemoryKind::kWorking].peak_bytes);
}

// {elements of the largest unit, of all, most elements gathered at a time}.
std::vector<int64_t> MostGathered(const TrainingSpec& spec) {
  std::vector<int64_t> figures;
  const std::vector<std::string> answers =
      RunOnRanks(2, "MostGathered", spec.ToText());
  EXPECT_EQ(answers[0], answers[1]);
  for (const std::string& word :
       std::vector<std::string>(absl::StrSplit(answers[0], ' '))) {
    figures.push_back(std::stoll(word));
  }
  figures[2] /= static_cast<int64_t>(sizeof(float));
  return figures;
}

// Recorded or not, with units gathered ahead or kept for backward.
TEST(MaxLiveTest, NoMoreIsWholeAtATime) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.stage = 3;
  spec.shared = "off";
  const std::vector<int64_t> all = MostGathered(spec);
  ASSERT_EQ(all[2], all[1]) << "nothing limits it";
  for (int64_t max_live : {int64_t{0}, all[0], all[0] + 1000, all[1] - 1}) {
    spec.max_live_parameters = max_live;
    for (int64_t prefetch : {0, 1000000}) {
      spec.prefetch_bucket_size = prefetch;
      for (const char* reshard : {"true", "false"}) {
        spec.reshard = reshard;
        for (int steps : {1, 4}) {
          spec.steps = steps;
          SCOPED_TRACE(spec.ToText());
          EXPECT_LE(MostGathered(spec)[2], std::max(max_live, all[0]));
        }
      }
    }
  }
}

TEST(MaxLiveTest, ItIsMadeUseOf) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.stage = 3;
  spec.shared = "off";
  const std::vector<int64_t> all = MostGathered(spec);
  spec.max_live_parameters = all[0] + 1000;
  EXPECT_GT(MostGathered(spec)[2], all[0]);
  spec.max_live_parameters = 0;
  EXPECT_EQ(MostGathered(spec)[2], all[0]);
}

}  // namespace
}  // namespace tessera
