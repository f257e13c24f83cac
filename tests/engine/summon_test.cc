// Tests Engine::Summon: what is written through raw pointers into parameters
// that are whole in place, on all ranks or on rank 0 alone, is what SetMaster
// would have written; or nothing has changed.
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/flat/use.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Every second parameter, so that units are held of which others were not
// asked for. A tied one once.
std::vector<std::string> Names(const TestModel& model) {
  std::vector<std::string> names;
  std::vector<at::Tensor> seen;
  int i = 0;
  for (const auto& p : model.named_parameters()) {
    const bool again =
        std::any_of(seen.begin(), seen.end(),
                    [&](const at::Tensor& t) { return t.is_same(p.value()); });
    seen.push_back(p.value());
    if (!again && i++ % 2 == 0) names.push_back(p.key());
  }
  return names;
}

// Writes by a pointer, which no operator sees.
template <typename T>
void DoubleAll(const at::Tensor& t) {
  T* const data = t.data_ptr<T>();
  for (int64_t i = 0; i < t.numel(); ++i) data[i] = data[i] + data[i];
}
void Double(const at::Tensor& t) {
  if (t.scalar_type() == torch::kBFloat16) {
    DoubleAll<at::BFloat16>(t);
  } else {
    DoubleAll<float>(t);
  }
}

// All masters and working copies as lines. COLLECTIVE.
absl::StatusOr<Record> Values(Trainee* t) {
  Record record;
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t->engine->FullStateDict());
  for (const auto& [name, value] : dict) {
    record.push_back(ParameterLine(absl::StrCat(name, " master"), value));
  }
  TESSERA_ASSIGN_OR_RETURN(const Record working,
                           ParametersOf(*t->engine, *t->model));
  record.insert(record.end(), working.begin(), working.end());
  return record;
}

// Compares the state of both, now and after a step.
absl::StatusOr<std::string> Compare(Trainee* expected, Trainee* got) {
  std::string difference;
  for (int step = 1; step < 3; ++step) {
    TESSERA_ASSIGN_OR_RETURN(const Record want, Values(expected));
    TESSERA_ASSIGN_OR_RETURN(const Record have, Values(got));
    difference = FirstDifference(want, have);
    if (!difference.empty()) return absl::StrCat("step ", step, difference);
    TESSERA_RETURN_IF_ERROR(expected->TrainStep(step));
    TESSERA_RETURN_IF_ERROR(got->TrainStep(step));
  }
  TESSERA_RETURN_IF_ERROR(expected->engine->Close());
  TESSERA_RETURN_IF_ERROR(got->engine->Close());
  return difference;
}

// `args` is "rank0_only writeback close|spec". Doubles parameters within a
// scope. Returns "" if the result is that of SetMaster, or no change where
// there should be none.
TESSERA_RANK_FUNCTION(WriteSummoned) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(args, absl::MaxSplits('|', 1));
  const std::vector<std::string> flags = absl::StrSplit(parts.first, ' ');
  SummonOptions options;
  options.rank0_only = flags[0] == "1";
  options.writeback = flags[1] == "1";
  const bool closes = flags[2] == "1";
  const TrainingSpec spec = TrainingSpec::FromText(parts.second);
  TESSERA_ASSIGN_OR_RETURN(Trainee expected,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(expected.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const std::vector<std::string> names = Names(*t.model);
  // Earlier writes are kept, whatever becomes of the scope.
  for (Trainee* each : {&expected, &t}) {
    torch::NoGradGuard no_grad;
    each->parameter(names[0]).mul_(3);
  }
  std::vector<at::Tensor> before;
  for (const std::string& name : names) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor value, t.engine->Parameter(name));
    before.push_back(value);
    if (!options.writeback || !closes) continue;
    TESSERA_RETURN_IF_ERROR(expected.engine->SetMaster(name, value * 2));
  }
  TESSERA_ASSIGN_OR_RETURN(Engine::SummonScope scope,
                           t.engine->SummonByName(names, options));
  for (size_t i = 0; i < names.size(); ++i) {
    const at::Tensor p = t.parameter(names[i]);
    if (!options.rank0_only || world.rank() == 0) {
      Double(p);
      if (!p.equal(before[i] * 2)) return absl::StrCat(names[i], " not whole");
      // An operator's write is one, too.
      torch::NoGradGuard no_grad;
      p.mul_(0.5);
      p.mul_(2);
    } else if (spec.stage == 3 && spec.shared == "off" &&
               spec.param_persistence_threshold == 0) {
      try {
        p.data_ptr();
        return absl::StrCat(names[i], " is whole here, too");
      } catch (const c10::Error& error) {
      }
    }
  }
  if (closes) {
    TESSERA_RETURN_IF_ERROR(scope.Close());
  } else {
    const Engine::SummonScope ends = std::move(scope);
  }
  return Compare(&expected, &t);
}

struct Mode {
  const char* name;
  int stage;
  const char* shared;
  const char* served;
  int64_t persistent;
};

// The parameters are world size, mode and dtype.
class SummonTest
    : public ::testing::TestWithParam<std::tuple<int, Mode, std::string>> {
 protected:
  TrainingSpec Spec(const std::string& model) const {
    const auto& [world_size, mode, dtype] = GetParam();
    TrainingSpec spec;
    spec.model = model;
    spec.stage = mode.stage;
    spec.shared = mode.shared;
    spec.served = mode.served;
    spec.param_persistence_threshold = mode.persistent;
    spec.remainder_masters = dtype == "remainders";
    spec.dtype = spec.remainder_masters ? "bf16" : dtype;
    spec.fp32_norms = dtype != "fp32";
    return spec;
  }
  void ExpectWrites(const std::string& flags) {
    for (const char* model : {"ConvNorm", "Frozen", "Tied"}) {
      const std::string args = absl::StrCat(flags, "|", Spec(model).ToText());
      EXPECT_THAT(RunOnRanks(std::get<0>(GetParam()), "WriteSummoned", args),
                  Each(""))
          << args;
    }
  }
};
const Mode kModes[] = {{"Stage0", 0, "auto", "auto", 0},
                       {"Stage1", 1, "auto", "auto", 0},
                       {"Stage2", 2, "auto", "auto", 0},
                       {"Stage3", 3, "auto", "auto", 0},
                       {"Stage3Collective", 3, "off", "off", 0},
                       {"Stage3Persistent", 3, "off", "auto", 100}};
std::string CaseName(
    const ::testing::TestParamInfo<std::tuple<int, Mode, std::string>>& info) {
  return absl::StrCat("World", std::get<0>(info.param),
                      std::get<1>(info.param).name, std::get<2>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Worlds, SummonTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::ValuesIn(kModes),
                                            ::testing::Values("fp32")),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Of16Bits, SummonTest,
                         ::testing::Combine(::testing::Values(2),
                                            ::testing::ValuesIn(kModes),
                                            ::testing::Values("bf16")),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(OfRemainders, SummonTest,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::ValuesIn(kModes),
                                            ::testing::Values("remainders")),
                         CaseName);

TEST_P(SummonTest, AllWrite) { ExpectWrites("0 1 1"); }
TEST_P(SummonTest, Rank0WritesForAll) { ExpectWrites("1 1 1"); }
TEST_P(SummonTest, AllReadAndWhatTheyWroteIsTakenBack) {
  ExpectWrites("0 0 1");
}
TEST_P(SummonTest, Rank0ReadsAndWhatItWroteIsTakenBack) {
  ExpectWrites("1 0 1");
}
TEST_P(SummonTest, WithoutCloseWritesAreTakenBack) {
  ExpectWrites("0 1 0");
  ExpectWrites("1 1 0");
}

TEST(SummonLogTest, WritesThatAreTakenBackAreInTheLog) {
  TrainingSpec spec;
  spec.stage = 3;
  RunOnRanks(2, "WriteSummoned", absl::StrCat("1 1 0|", spec.ToText()));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(0),
              HasSubstr("a scope of Engine::Summon ended without Close()"));
  EXPECT_EQ(RankPool::Get(2)->stderr_of(1), "");
}

// Rank 0 uses what it holds in another order than the forward; the next step
// gathers ahead by what all ranks have used.
TESSERA_RANK_FUNCTION(UseSummoned) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  SummonOptions options;
  options.rank0_only = true;
  const auto weight = [](int block) {
    return absl::StrCat("blocks.", block, ".up.weight");
  };
  TESSERA_ASSIGN_OR_RETURN(
      Engine::SummonScope scope,
      t.engine->SummonByName({weight(0), weight(1), weight(2)}, options));
  if (world.rank() == 0) {
    torch::NoGradGuard no_grad;
    for (int block : {0, 2, 1}) t.parameter(weight(block)).sum();
  }
  TESSERA_RETURN_IF_ERROR(scope.Close());
  // The first use after that is of the first block.
  {
    torch::NoGradGuard no_grad;
    t.parameter(weight(0)).sum();
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return t.engine->Close().ToString();
}

TEST(SummonUsesTest, WhatRank0UsesAloneIsNoPartOfTheSchedule) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.shared = spec.served = "off";
  spec.param_persistence_threshold = 0;
  EXPECT_THAT(RunOnRanks(2, "UseSummoned", spec.ToText()), Each("OK"));
}

// Returns the error of each misuse, on every rank.
TESSERA_RANK_FUNCTION(MisuseSummon) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(Trainee untouched,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(untouched.TrainStep(0));
  const bool last = world.rank() == world.world_size() - 1;
  std::string said;
  const auto say = [&](const absl::Status& status) {
    absl::StrAppend(&said, status.ToString(), "\n");
  };
  const std::string name = "out.bias";
  say(t.engine->SummonByName({last ? "out.bais" : name}).status());
  const std::string first = t.model->named_parameters()[0].key();
  say(t.engine->SummonByName({last ? name : first}).status());
  say(t.engine->Summon({t.parameter(name).detach()}).status());
  say(t.engine->Summon({at::Tensor()}).status());
  for (const bool rank0_only : {false, true}) {
    SummonOptions options;
    options.rank0_only = rank0_only;
    const at::Tensor loss = t.Loss(1);
    TESSERA_ASSIGN_OR_RETURN(auto scope,
                             t.engine->SummonByName({name}, options));
    say(t.engine->SummonByName({name}).status());
    say(t.engine->Backward(loss));
    say(t.engine->Step());
    say(t.engine->Master(name).status());
    say(t.engine->FullStateDict().status());
    say(t.engine->SaveCheckpoint("/nowhere"));
    say(t.engine->Close());
    if (!rank0_only) {
      const Use use(t.parameter(name));
      say(scope.Close());
    }
    TESSERA_RETURN_IF_ERROR(scope.Close());
    TESSERA_RETURN_IF_ERROR(scope.Close());  // nothing any more
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string difference,
                           Compare(&untouched, &t));
  return said + difference;
}

TEST(SummonMisuseTest, IsNamedOnAllRanks) {
  for (const char* how : {"auto", "off"}) {
    for (const int stage : {1, 3}) {
      TrainingSpec spec;
      spec.stage = stage;
      spec.shared = spec.served = how;
      const std::vector<std::string> said =
          RunOnRanks(2, "MisuseSummon", spec.ToText());
      EXPECT_THAT(
          said,
          Each(AllOf(
              HasSubstr("NOT_FOUND: [Engine::Summon] rank 1: the engine has "
                        "no parameter 'out.bais'"),
              HasSubstr("the list of units, or the options, of "
                        "Engine::Summon differs between rank 0 ("),
              HasSubstr("tensor 0 is not a parameter that this engine shards"),
              HasSubstr("the unit is in another scope of Engine::Summon"),
              HasSubstr("a scope of Engine::Summon is open; Close() it"),
              HasSubstr("the unit is held by a tessera::Use, too"))));
      for (const std::string& each : said) {
        const std::vector<std::string> lines = absl::StrSplit(each, '\n');
        EXPECT_EQ(lines.size(), 4 + 7 + 1 + 7 + 1) << each;
        EXPECT_EQ(lines.back(), "");
        for (const std::string& line : lines) EXPECT_NE(line, "OK") << each;
      }
    }
  }
}

// Gathers are collectives, and rank 0 alone holds a unit: another rank that
// uses it gets an error, and waits for nobody.
TESSERA_RANK_FUNCTION(UseElsewhere) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.shared = spec.served = "off";
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  SummonOptions options;
  options.rank0_only = true;
  TESSERA_ASSIGN_OR_RETURN(auto scope,
                           t.engine->SummonByName({"out.bias"}, options));
  const auto value = t.engine->Parameter("out.bias");
  std::string said = value.status().ToString();
  TESSERA_RETURN_IF_ERROR(scope.Close());
  TESSERA_RETURN_IF_ERROR(t.engine->Parameter("out.bias").status());
  return said;
}

TEST(SummonMisuseTest, AnotherRankCannotGatherWhatRank0Holds) {
  const std::vector<std::string> said = RunOnRanks(2, "UseElsewhere", "");
  EXPECT_EQ(said[0], "OK");
  EXPECT_THAT(said[1], HasSubstr("rank 0 alone holds the unit whole"));
}

// A scope that outlives its engine.
TESSERA_RANK_FUNCTION(OutliveEngine) {
  TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(auto scope, t.engine->SummonByName({"out.bias"}));
  t.engine.reset();
  return scope.Close().ToString();
}

TEST(SummonMisuseTest, AScopeMayOutliveItsEngine) {
  for (const int stage : {1, 3}) {
    TrainingSpec spec;
    spec.stage = stage;
    EXPECT_THAT(RunOnRanks(2, "OutliveEngine", spec.ToText()),
                Each(HasSubstr("its engine was destroyed")));
  }
}

}  // namespace
}  // namespace tessera
