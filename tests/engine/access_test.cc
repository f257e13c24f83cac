// Reads and writes values by name: what is read of a sharded engine has the
// oracle's bits, and training continues with written values as if they had
// always been there.
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
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

// Everything that can be read, of each parameter, as lines.
absl::StatusOr<Record> ReadAll(Trainee* t) {
  Record record;
  for (const auto& p : t->model->named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                             t->engine->Master(p.key()));
    record.push_back(ParameterLine(absl::StrCat(p.key(), " master"), master));
    for (const auto which : {"exp_avg", "exp_avg_sq"}) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor state,
                               t->engine->OptimizerStateOf(p.key(), which));
      record.push_back(ParameterLine(absl::StrCat(p.key(), " state"), state));
    }
  }
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t->engine->FullStateDict());
  for (const auto& [name, value] : dict) {
    record.push_back(ParameterLine(absl::StrCat(name, " dict"), value));
  }
  return record;
}

// args: a TrainingSpec. Makes two steps; returns all that can be read.
TESSERA_RANK_FUNCTION(ReadAfterSteps) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  TESSERA_ASSIGN_OR_RETURN(const Record record, ReadAll(&t));
  return ToText(record);
}

// args: a TrainingSpec. One engine's state after two steps goes by name into a
// fresh one of another seed, whose gradient is replaced by the first one's,
// too; then both make the same steps.
TESSERA_RANK_FUNCTION(CopyByName) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee from,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(Trainee to,
                           Trainee::Make(spec, world.communicator()));
  // Step counts must agree: they are not states of elements.
  for (int step = 0; step < 2; ++step) {
    TESSERA_RETURN_IF_ERROR(from.TrainStep(step));
    TESSERA_RETURN_IF_ERROR(to.TrainStep(5 + step));
  }
  TESSERA_RETURN_IF_ERROR(from.Backward(2));
  TESSERA_RETURN_IF_ERROR(to.Backward(7));
  for (const auto& p : from.model->named_parameters()) {
    const std::string& name = p.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                             from.engine->Master(name));
    TESSERA_RETURN_IF_ERROR(to.engine->SetMaster(name, master));
    // Operators see the new value at once.
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor theirs,
                             from.engine->Parameter(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor ours, to.engine->Parameter(name));
    if (!ours.equal(theirs)) return absl::StrCat(name, " was not published");
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                             from.engine->Gradient(name));
    if (gradient.defined()) {
      TESSERA_RETURN_IF_ERROR(to.engine->SetGradient(name, gradient));
    }
    for (const auto which : {"exp_avg", "exp_avg_sq"}) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor state,
                               from.engine->OptimizerStateOf(name, which));
      TESSERA_RETURN_IF_ERROR(to.engine->SetOptimizerState(name, which, state));
    }
  }
  // Buffers are the module's own.
  for (const auto& b : from.model->named_buffers()) {
    to.model->named_buffers()[b.key()].copy_(b.value());
  }
  TESSERA_RETURN_IF_ERROR(from.engine->Step());
  TESSERA_RETURN_IF_ERROR(to.engine->Step());
  TESSERA_RETURN_IF_ERROR(from.TrainStep(3));
  TESSERA_RETURN_IF_ERROR(to.TrainStep(3));
  TESSERA_ASSIGN_OR_RETURN(const Record expected, ReadAll(&from));
  TESSERA_ASSIGN_OR_RETURN(const Record got, ReadAll(&to));
  return FirstDifference(expected, got);
}

// The parameters are stage and dtype.
class AccessTest
    : public ::testing::TestWithParam<std::tuple<int, std::string>> {
 protected:
  AccessTest() {
    spec_.model = "ConvNorm";  // strides, buffers
    spec_.stage = std::get<0>(GetParam());
    spec_.dtype = std::get<1>(GetParam());
    spec_.fp32_norms = spec_.dtype != "fp32";
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, AccessTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values("fp32", "bf16")),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

TEST_P(AccessTest, ReadsTheSameAtEveryStage) {
  TrainingSpec replicated = spec_;
  replicated.stage = 0;
  static auto* const expected =
      new std::map<std::string, std::vector<std::string>>;
  std::vector<std::string>& reference = (*expected)[spec_.dtype];
  if (reference.empty()) {
    reference = RunOnRanks(2, "ReadAfterSteps", replicated.ToText());
  }
  EXPECT_THAT(reference[0], HasSubstr("weight2 state"));
  EXPECT_EQ(RunOnRanks(2, "ReadAfterSteps", spec_.ToText()), reference);
}

TEST_P(AccessTest, WhatIsWrittenTrainsOn) {
  EXPECT_THAT(RunOnRanks(2, "CopyByName", spec_.ToText()), Each(""));
}

// args: a TrainingSpec. Puts the ranks' parts of the masters together; "" if
// that is the full state dict, every element there as often as it should be.
TESSERA_RANK_FUNCTION(JoinShards) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t.engine->FullStateDict());
  TESSERA_ASSIGN_OR_RETURN(const auto shards, t.engine->ShardedStateDict());
  const int64_t copies = spec.stage == 0 ? world.world_size() : 1;
  std::vector<std::string> seen;
  for (const auto& p : t.model->named_parameters()) {
    if (!t.engine->Parameter(p.key()).ok()) continue;  // a second name
    at::Tensor expected;
    for (const auto& [name, value] : dict) {
      if (name == p.key()) expected = value;
    }
    // Shards are joined in memory order, with a count of each element.
    at::Tensor joined = torch::zeros({expected.numel()}, expected.dtype());
    at::Tensor count = torch::zeros({expected.numel()}, torch::kLong);
    for (const ParameterShard& shard : shards) {
      if (shard.name != p.key()) continue;
      if (at::IntArrayRef(shard.sizes) != p.value().sizes() ||
          at::IntArrayRef(shard.strides) != p.value().strides() ||
          shard.values.scalar_type() != expected.scalar_type()) {
        return absl::StrCat(p.key(), " is described otherwise");
      }
      const int64_t end = shard.begin + shard.values.numel();
      joined.slice(0, shard.begin, end).copy_(shard.values);
      count.slice(0, shard.begin, end).add_(1);
    }
    const at::Tensor numbers =
        joined.is_complex() ? at::view_as_real(joined) : joined;
    for (const at::Tensor& each : {numbers, count}) {
      TESSERA_RETURN_IF_ERROR(
          world.communicator()->AllReduceSum(each, {"parts"}).Wait());
    }
    if (!count.eq(copies).all().item<bool>()) {
      return absl::StrCat(p.key(), " is not covered");
    }
    if (copies != 1) joined.div_(copies);
    if (!joined.as_strided(p.value().sizes(), p.value().strides())
             .equal(expected)) {
      return absl::StrCat(p.key(), " differs");
    }
  }
  return "";
}

TEST_P(AccessTest, ShardsAreTheParts) {
  for (const char* model : {"ConvNorm", "Complex", "Tied", "SharedStorage"}) {
    spec_.model = model;
    if (spec_.model == "Complex" && spec_.dtype != "fp32") continue;
    EXPECT_THAT(RunOnRanks(2, "JoinShards", spec_.ToText()), Each("")) << model;
  }
}

// args: a TrainingSpec. Returns the error of each misuse.
TESSERA_RANK_FUNCTION(MisuseAccess) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  const std::string name = "head.bias";
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor value, t.engine->Master(name));
  std::string said;
  const auto say = [&](const absl::Status& status) {
    absl::StrAppend(&said, status.ToString(), "\n");
  };
  say(t.engine->SetMaster("head.bais", value));
  say(t.engine->SetMaster(name, value.slice(0, 1)));
  say(t.engine->SetMaster(name, at::Tensor()));
  say(t.engine->SetMaster(name, value + world.rank()));
  say(t.engine->SetGradient(name, value));
  say(t.engine->SetOptimizerState(name, "exp_avg", value.unsqueeze(0)));
  // None of it has changed anything.
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor after, t.engine->Master(name));
  absl::StrAppend(&said, after.equal(value) ? "unchanged" : "changed");
  StateDictOptions rank0_only;
  rank0_only.rank0_only = true;
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict,
                           t.engine->FullStateDict(rank0_only));
  absl::StrAppend(&said, " ", dict.size());
  return said;
}

// args: "<stage> <served_gathers>". A full state dict of tied 16-bit
// parameters, on rank 0 alone; whether all of their names have the masters'
// values.
TESSERA_RANK_FUNCTION(TiedStateDict) {
  TrainingSpec spec;
  spec.model = "Tied";
  spec.dtype = "bf16";
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  spec.stage = std::stoi(words[0]);
  spec.served = words[1];
  spec.shared = "off";
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  StateDictOptions options;
  options.rank0_only = true;
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict,
                           t.engine->FullStateDict(options));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  if (world.rank() != 0) return std::string("0");
  int64_t of_16_bits = 0;
  for (const auto& [name, value] : dict) {
    of_16_bits += value.scalar_type() == torch::kBFloat16 ? 1 : 0;
  }
  const size_t names = t.model->named_parameters().size();
  return absl::StrCat(dict.size() - names, " ", of_16_bits);
}

TEST(AccessTiedTest, AStateDictOfRank0IsCollectiveAndOfMasters) {
  for (const char* how : {"3 off", "3 on", "1 auto"}) {
    EXPECT_EQ(RunOnRanks(2, "TiedStateDict", how)[0], "0 0") << how;
  }
}

// Only the last rank has another name: nobody waits for it.
TESSERA_RANK_FUNCTION(OneRankMisspells) {
  TrainingSpec spec;
  spec.stage = 3;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor value,
                           t.engine->Master("out.bias"));
  const char* name = world.rank() == 0 ? "out.bias" : "out.bais";
  return t.engine->SetMaster(name, value).ToString();
}

TEST(AccessMisuseTest, AMistakeOfOneRankIsToldOnAll) {
  EXPECT_THAT(RunOnRanks(2, "OneRankMisspells", ""),
              Each(AllOf(HasSubstr("[Engine::SetMaster] rank 1"),
                         HasSubstr("no parameter 'out.bais'"))));
}

TEST(AccessMisuseTest, IsNamedOnAllRanks) {
  TrainingSpec spec;
  spec.model = "ConvNorm";
  spec.stage = 3;
  const std::vector<std::string> said =
      RunOnRanks(2, "MisuseAccess", spec.ToText());
  EXPECT_THAT(
      said,
      Each(AllOf(
          HasSubstr("NOT_FOUND: [Engine::SetMaster] rank 0: the engine has no "
                    "parameter 'head.bais'"),
          HasSubstr("[Engine::SetMaster] rank 0: parameter 'head.bias' is "),
          HasSubstr("and the value is undefined"),
          HasSubstr("the value of Engine::SetMaster differs between rank 0"),
          HasSubstr("Engine::SetGradient: parameter 'head.bias' has no "
                    "gradient"),
          HasSubstr("[Engine::SetOptimizerState] rank 0: parameter "
                    "'head.bias' is "),
          HasSubstr("unchanged"))));
  // 9 parameters, 3 buffers.
  EXPECT_THAT(said[0], ::testing::EndsWith(" 12"));
  EXPECT_THAT(said[1], ::testing::EndsWith(" 0"));
}

// Rank 1 has a buffer that has no memory, and trains on.
TESSERA_RANK_FUNCTION(StateDictOfABufferOnMeta) {
  TrainingSpec spec;
  spec.stage = 3;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  if (t.rank == 1) {
    t.model->register_buffer("weightless", torch::empty({3}, torch::kMeta));
  }
  const absl::Status status = t.engine->FullStateDict().status();
  StateDictOptions options;
  options.rank0_only = true;  // copies none of it
  TESSERA_RETURN_IF_ERROR(t.engine->FullStateDict(options).status());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return status.ToString();
}

TEST(AccessMisuseTest, ABufferThatCannotBeCopiedIsNamedOnAllRanks) {
  EXPECT_THAT(RunOnRanks(2, "StateDictOfABufferOnMeta", ""),
              Each(HasSubstr("rank 1: copy of 'weightless'")));
}

// args: ranks of a shard group. What a rank that holds all of it meets outside
// of operators, and what the ledger counts meanwhile, beyond one copy.
TESSERA_RANK_FUNCTION(HiddenWhereAlone) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.stage = 3;
  spec.shard_group = std::stoi(std::string(args));
  MemoryLedger& ledger = MemoryLedger::Host();
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  ledger.ResetPeak();
  const int64_t before = ledger.total().current_bytes;
  std::string said;
  const auto& parameters = t.model->named_parameters();
  for (const bool used : {false, true}) {
    if (used) (void)t.Loss(0);
    for (const auto& p : parameters) {
      try {
        p.value().data_ptr();
        return absl::StrCat(p.key(), " is shown");
      } catch (const c10::Error& error) {
        if (!absl::StrContains(error.what(),
                               "' is sharded and freed between uses")) {
          return std::string(error.what());
        }
      }
    }
  }
  const auto use = Use(parameters[0].value());
  absl::StrAppend(&said, parameters[0].value().data_ptr() != nullptr, " ",
                  ledger.total().peak_bytes - before);
  return said;
}

TEST(AccessMisuseTest, WhoIsAloneHoldsOneCopyAndIsNotShownItEither) {
  EXPECT_THAT(RunOnRanks(1, "HiddenWhereAlone", "0"), Each("1 0"));
  EXPECT_THAT(RunOnRanks(2, "HiddenWhereAlone", "1"), Each("1 0"));
}

}  // namespace
}  // namespace tessera
