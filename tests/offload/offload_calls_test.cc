// Makes every call that reads or changes what lies on a disk right after a Step
// while the update goes on, and right after a Backward, while units are stepped
// early: its result, and that of the training, have the bits of the same
// program without a disk.
#include <torch/torch.h>

#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/flat/use.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::StartsWith;

constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq"};

struct Call {
  Trainee* t;
  std::string dir;  // of this run
  Record* record;

  Engine& engine() const { return *t->engine; }
  // Returns the names of parameters that have states.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& p : t->model->named_parameters()) {
      if (p.value().requires_grad()) names.push_back(p.key());
    }
    return names;
  }
  void Add(const std::string& name, const at::Tensor& value) const {
    record->push_back(ParameterLine(name, value));
  }
};
using Program = absl::Status (*)(const Call& call);

// Reads from the last unit on, whose update is the last.
template <typename Get>
absl::Status ReadAll(const Call& call, const Get& get) {
  const std::vector<std::string> names = call.Names();
  for (size_t i = names.size(); i-- > 0;) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor value, get(names[i]));
    call.Add(names[i], value);
  }
  return absl::OkStatus();
}

absl::Status ReadMasters(const Call& call) {
  return ReadAll(call, [&](auto& name) { return call.engine().Master(name); });
}
absl::Status ReadParameters(const Call& call) {
  return ReadAll(call,
                 [&](auto& name) { return call.engine().Parameter(name); });
}
absl::Status ReadStates(const Call& call) {
  for (const char* const which : kStates) {
    TESSERA_RETURN_IF_ERROR(ReadAll(call, [&](auto& name) {
      return call.engine().OptimizerStateOf(name, which);
    }));
  }
  return absl::OkStatus();
}

absl::Status WriteMasters(const Call& call) {
  for (const std::string& name : call.Names()) {
    const at::Tensor old = call.t->parameter(name);
    TESSERA_RETURN_IF_ERROR(call.engine().SetMaster(
        name, torch::arange(old.numel()).reshape(old.sizes()) * 1e-5 + 0.01));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor now,
                             call.engine().Parameter(name));
    call.Add(name, now);
  }
  return absl::OkStatus();
}

absl::Status WriteStates(const Call& call) {
  const std::vector<std::string> names = call.Names();
  for (size_t i = names.size(); i-- > 0;) {
    const at::Tensor like = call.t->parameter(names[i]);
    TESSERA_RETURN_IF_ERROR(call.engine().SetOptimizerState(
        names[i], kStates[i % 2],
        torch::full(like.sizes(), 1e-3 * static_cast<double>(i + 1))));
  }
  return absl::OkStatus();
}

// The gradient of the step before is still with the update.
absl::Status ChangeGradients(const Call& call) {
  for (const std::string& name : call.Names()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor none,
                             call.engine().Gradient(name));
    call.Add(name, none);
  }
  TESSERA_RETURN_IF_ERROR(call.t->Backward(5));
  for (const std::string& name : call.Names()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                             call.engine().Gradient(name));
    call.Add(name, gradient);
    TESSERA_RETURN_IF_ERROR(call.engine().SetGradient(name, gradient * 3 + 1));
  }
  TESSERA_RETURN_IF_ERROR(call.engine().Step());
  // This micro-batch is dropped, too.
  TESSERA_RETURN_IF_ERROR(call.t->Backward(6));
  return call.engine().ZeroGrad();
}

absl::Status ReadDicts(const Call& call) {
  for (const bool rank0_only : {false, true}) {
    StateDictOptions options;
    options.rank0_only = rank0_only;
    TESSERA_ASSIGN_OR_RETURN(const StateDict dict,
                             call.engine().FullStateDict(options));
    for (const auto& [name, value] : dict) call.Add(name, value);
    TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 4, call.record));
  }
  TESSERA_ASSIGN_OR_RETURN(const auto shards, call.engine().ShardedStateDict());
  for (const ParameterShard& shard : shards) {
    call.Add(absl::StrCat(shard.name, " ", shard.begin), shard.values);
  }
  return absl::OkStatus();
}

absl::Status WriteSummoned(const Call& call) {
  for (const bool rank0_only : {false, true}) {
    for (const bool writeback : {true, false}) {
      SummonOptions options;
      options.rank0_only = rank0_only;
      options.writeback = writeback;
      const std::vector<std::string> names = {"head.bias",
                                              "blocks.2.up.weight"};
      TESSERA_ASSIGN_OR_RETURN(auto scope,
                               call.engine().SummonByName(names, options));
      if (!rank0_only || call.t->rank == 0) {
        for (const std::string& name : names) {
          call.Add(name, call.t->parameter(name));
          Triple(call.t->parameter(name));
        }
      }
      TESSERA_RETURN_IF_ERROR(scope.Close());
      TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 4, call.record));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteUsed(const Call& call) {
  for (const char* name : {"blocks.3.up.weight", "blocks.1.up.bias"}) {
    const at::Tensor p = call.t->parameter(name);
    const Use use(p);
    call.Add(name, p);
    Triple(p);
  }
  return TrainWide(call.t, 3, 4, call.record);
}

// An operator writes parameters, a frozen one among them. The next step follows
// at once, and after the second write masters are read.
absl::Status WriteByOperator(const Call& call) {
  for (int i = 0; i < 2; ++i) {
    {
      torch::NoGradGuard no_grad;
      for (const char* name :
           {"head.weight", "blocks.3.up.weight", "blocks.1.up.weight"}) {
        call.t->parameter(name).mul_(1.5);
      }
      call.t->parameter("blocks.0.norm.weight").index({2}).fill_(0.25);
    }
    if (i == 0) TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 4, call.record));
  }
  return ReadMasters(call);
}

absl::Status SaveAndLoadSafetensors(const Call& call) {
  TESSERA_RETURN_IF_ERROR(call.engine().SaveSafetensors(call.dir));
  TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 5, call.record));
  TESSERA_RETURN_IF_ERROR(call.engine().LoadSafetensors(call.dir).status());
  TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 4, call.record));
  return call.engine().LoadSafetensors(call.dir).status();
}

absl::Status Unfreeze(const Call& call) {
  Wide(*call.t).Freeze(1, false);
  Wide(*call.t).Freeze(2, true);
  TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 5, call.record));
  return WriteStates(call);
}

absl::Status SetRate(const Call& call) {
  TESSERA_RETURN_IF_ERROR(call.engine().SetLearningRate(0.5));
  TESSERA_RETURN_IF_ERROR(TrainWide(call.t, 3, 4, call.record));
  return call.engine().SetLearningRate(1e-4);
}

absl::Status Evaluate(const Call& call) {
  torch::NoGradGuard no_grad;
  call.t->model->eval();
  for (int64_t i = 0; i < 3; ++i) {
    call.record->push_back(LossLine(9, 0, call.t->Loss(i)));
  }
  call.t->model->train();
  return absl::OkStatus();
}

// The module is plain, computes with the values, and nothing is left of the
// disk while the engine is there.
absl::Status CloseAtOnce(const Call& call) {
  TESSERA_RETURN_IF_ERROR(call.engine().Close());
  for (const auto& p : call.t->model->named_parameters()) {
    call.Add(p.key(), p.value());
  }
  const at::Tensor loss = call.t->Loss(3);
  loss.backward();
  call.record->push_back(LossLine(3, 0, loss));
  call.Add("gradient", call.t->parameter("head.weight").grad());
  if (!OpenSwapFiles().empty()) return absl::InternalError("a swap file");
  call.t->engine.reset();
  return absl::OkStatus();
}

// The next engine of the process trains.
absl::Status Destroy(const Call& call) {
  call.t->engine.reset();
  if (!OpenSwapFiles().empty()) return absl::InternalError("a swap file");
  const TrainingSpec spec = OnDisk();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee next,
      MakeWide(spec, World::Current()->communicator(), /*seed=*/6));
  TESSERA_RETURN_IF_ERROR(TrainWide(&next, 0, 2, call.record));
  return next.engine->Close();
}

const std::vector<std::pair<std::string, Program>>& Programs() {
  static const auto* programs =
      new std::vector<std::pair<std::string, Program>>{
          {"ReadMasters", ReadMasters},
          {"ReadParameters", ReadParameters},
          {"WriteMasters", WriteMasters},
          {"ReadStates", ReadStates},
          {"WriteStates", WriteStates},
          {"ChangeGradients", ChangeGradients},
          {"ReadDicts", ReadDicts},
          {"WriteSummoned", WriteSummoned},
          {"WriteUsed", WriteUsed},
          {"WriteByOperator", WriteByOperator},
          {"SaveAndLoadSafetensors", SaveAndLoadSafetensors},
          {"Unfreeze", Unfreeze},
          {"SetRate", SetRate},
          {"Evaluate", Evaluate},
          {"CloseAtOnce", CloseAtOnce},
          {"Destroy", Destroy},
      };
  return *programs;
}

// The answers are those without a disk; the program may leave the engine in the
// middle of a step, or without gradients.
absl::Status RunWithinStep(const Program& program, const Call& call) {
  TESSERA_RETURN_IF_ERROR(call.t->Backward(3));
  call.record->push_back(program(call).ToString());
  if (call.t->engine == nullptr) return absl::OkStatus();
  call.record->push_back(call.engine().Step().ToString());
  return call.engine().ZeroGrad();
}

// args: "<program>|<when>|<folder>|<TrainingSpec>".
TESSERA_RANK_FUNCTION(RunProgram) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits('|', 3));
  const TrainingSpec spec = TrainingSpec::FromText(parts[3]);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(spec, world.communicator()));
  const bool on_disk =
      spec.states_on_disk >= 0 || spec.parameters_in_memory >= 0;
  if (OpenSwapFiles().size() != (on_disk ? 1 : 0)) {
    return absl::InternalError(
        absl::StrCat(OpenSwapFiles().size(), " swap files"));
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 3, &record));
  for (const auto& [name, program] : Programs()) {
    if (name != parts[0]) continue;
    const Call call = {&t, parts[2], &record};
    TESSERA_RETURN_IF_ERROR(parts[1] == "after" ? program(call)
                                                : RunWithinStep(program, call));
  }
  if (t.engine == nullptr) return ToText(record);
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 7, 9, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  for (const auto& p : t.model->named_parameters()) {
    record.push_back(ParameterLine(p.key(), p.value()));
  }
  return ToText(record);
}

// Which of these a spec means by default depends on the backend.
const OffloadWay kWays[] = {
    {"StatesShared", 1, -1, "on", "off"},
    {"StatesServed", 1, -1, "off", "on"},
    {"HalfOfStates", 0.5, -1, "off", "off"},
    {"StatesAndHalfOfParameters", 1, 40'000},
    {"Parameters", -1, 0},
    kAllOnDisk,
};

class OffloadCallsTest
    : public ::testing::TestWithParam<std::pair<std::string, Program>> {
 protected:
  std::vector<std::string> Run(int world_size, const OffloadWay& way,
                               const std::string& dtype, const char* when) {
    const TempFolder folder;
    TrainingSpec spec = way.Spec(dtype);
    spec.poison = true;
    return RunOnRanks(world_size, "RunProgram",
                      absl::StrCat(GetParam().first, "|", when, "|",
                                   folder / "files", "|", spec.ToText()));
  }
  // Each program goes three ways right after a step, in one dtype, and the
  // other three within one, in the other dtype. Which they are changes from
  // program to program, so that each way meets each dtype at both times.
  void ExpectSameBits(size_t within) {
    size_t number = 0;
    while (Programs()[number].first != GetParam().first) ++number;
    std::vector<OffloadWay> ways;
    for (size_t w = 0; w < std::size(kWays); ++w) {
      if ((w + number / 2 + within) % 2 == 0) ways.push_back(kWays[w]);
    }
    ExpectSame(2, ways, (number + within) % 2 == 0 ? "fp32" : "bf16",
               within == 0 ? "after" : "within");
  }
  void ExpectSame(int world_size, const std::vector<OffloadWay>& ways,
                  const std::string& dtype, const char* when = "after") {
    const auto expected = Run(world_size, kInMemory, dtype, when);
    ASSERT_THAT(expected, Each(StartsWith("step 0, micro-batch 0: loss")));
    for (const OffloadWay& way : ways) {
      const auto got = Run(world_size, way, dtype, when);
      for (size_t r = 0; r < expected.size(); ++r) {
        EXPECT_EQ(FirstDifference(RecordFromText(expected[r]),
                                  RecordFromText(got[r])),
                  "")
            << way.name << " " << dtype << ", rank " << r;
      }
    }
  }
};

TEST_P(OffloadCallsTest, HasTheBitsOfTheSameWithoutADisk) {
  ExpectSameBits(/*within=*/0);
}

TEST_P(OffloadCallsTest, HasThemInTheMiddleOfAStep) {
  ExpectSameBits(/*within=*/1);
}

// One rank alone waits for its update where others do so in collectives.
TEST_P(OffloadCallsTest, HasThemOnOneRank) {
  ExpectSame(1, {kAllOnDisk}, "bf16");
}

INSTANTIATE_TEST_SUITE_P(All, OffloadCallsTest, ::testing::ValuesIn(Programs()),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace tessera
