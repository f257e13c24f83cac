// Units are stepped while the backward goes on: the bits are those of a run
// without a disk, whether or not a step goes as predicted.
#include <torch/torch.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/update_stream.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "testing/device/test_device.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::Gt;

// Step keeps what has begun by then; with `awaits_begun` that is all of it.
struct EarlyTrainee : Trainee {
  absl::Status Step() {
    const FlatParameterOptions& options =
        Registry::Global().Find(parameter("head.bias")).flat->options();
    if (awaits_begun && options.states_tier == Tier::kDisk) {
      // An update that changes nothing begins behind the others.
      TESSERA_RETURN_IF_ERROR(options.stream->Push({}).computed.Wait());
    }
    return engine->Step();
  }
  bool awaits_begun = false;
};

absl::Status Train(EarlyTrainee* t, int first, int end, Record* record) {
  for (int step = first; step < end; ++step) {
    const at::Tensor loss = t->Loss(step);
    TESSERA_RETURN_IF_ERROR(t->engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(t->Step());
    record->push_back(LossLine(step, 0, loss));
  }
  return absl::OkStatus();
}

// Step number `step`, in one of the ways of a program.
using Program = absl::Status (*)(EarlyTrainee* t, int step, Record* record);

absl::Status Plain(EarlyTrainee* t, int step, Record* record) {
  return Train(t, step, step + 1, record);
}

absl::Status Accumulates(EarlyTrainee* t, int step, Record* record) {
  return Train(t, 3 * step, 3 * step + 3, record);
}

absl::Status DropsGradients(EarlyTrainee* t, int step, Record* record) {
  if (step % 3 == 1) {
    TESSERA_RETURN_IF_ERROR(t->Backward(100 + step));
    TESSERA_RETURN_IF_ERROR(t->engine->ZeroGrad());
  }
  return Train(t, step, step + 1, record);
}

absl::Status AccumulatesByHand(EarlyTrainee* t, int step, Record* record) {
  if (step % 4 == 1) TESSERA_RETURN_IF_ERROR(t->Backward(100 + step));
  return Train(t, step, step + 1, record);
}

// The rate changes after the backward, whose early steps used the old one.
absl::Status ChangesRate(EarlyTrainee* t, int step, Record* record) {
  TESSERA_RETURN_IF_ERROR(t->Backward(step));
  if (step % 2 == 1) {
    TESSERA_RETURN_IF_ERROR(t->engine->SetLearningRate(1e-3 * (step + 1)));
  }
  return t->Step();
}

absl::Status WritesParameters(EarlyTrainee* t, int step, Record* record) {
  TESSERA_RETURN_IF_ERROR(t->Backward(step));
  if (step % 2 == 1) {
    torch::NoGradGuard no_grad;
    t->parameter("blocks.3.up.weight").mul_(1.25);
    t->parameter("head.bias").add_(0.5);
  }
  return t->Step();
}

// A hook that throws: no rank has that micro-batch.
absl::Status FailsInBackward(EarlyTrainee* t, int step, Record* record) {
  if (step % 3 == 1) {
    const at::Tensor loss = t->Loss(step);
    bool fails = true;
    auto hook = t->parameter("blocks.0.up.weight")
                    .register_hook([&](const at::Tensor&) {
                      if (fails) throw std::runtime_error("this one fails");
                    });
    const absl::Status failed = t->engine->Backward(loss);
    t->parameter("blocks.0.up.weight").remove_hook(hook);
    if (failed.ok()) return absl::InternalError("it did not fail");
  }
  return Train(t, step, step + 1, record);
}

// The number of parameters changes from one step to the next: what was expected
// does not come, or comes late.
absl::Status Freezes(EarlyTrainee* t, int step, Record* record) {
  Wide(*t).Freeze(1, step % 3 != 0);
  Wide(*t).Freeze(3, step % 4 == 2);
  return Train(t, step, step + 1, record);
}

// A save that is written while the next step's units are stepped early, and a
// load after some have been.
absl::Status SavesAndLoads(EarlyTrainee* t, int step, Record* record) {
  const std::string dir = absl::StrCat(TrainingSpec::SwapFolder(), "/saved");
  TESSERA_RETURN_IF_ERROR(Train(t, step, step + 1, record));
  SaveOptions options;
  options.async = true;
  if (step % 4 == 0) {
    TESSERA_RETURN_IF_ERROR(t->engine->SaveCheckpoint(dir, "", options));
  }
  if (step % 4 != 2) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(t->Backward(100 + step));
  return t->engine->LoadCheckpoint(dir).status();
}

// The checkpoint has no states of a unit that was frozen then: a load drops
// those that the unit has got since, and its next step begins with zeros.
absl::Status LoadsWithoutStates(EarlyTrainee* t, int step, Record* record) {
  const std::string dir = absl::StrCat(TrainingSpec::SwapFolder(), "/frozen");
  TESSERA_RETURN_IF_ERROR(Train(t, step, step + 1, record));
  if (step == 0) {
    TESSERA_RETURN_IF_ERROR(t->engine->SaveCheckpoint(dir));
    Wide(*t).Freeze(1, false);
  }
  if (step % 4 != 3) return absl::OkStatus();
  return t->engine->LoadCheckpoint(dir).status();
}

const std::vector<std::pair<std::string, Program>>& Programs() {
  static const auto* programs =
      new std::vector<std::pair<std::string, Program>>{
          {"Plain", Plain},
          {"DropsGradients", DropsGradients},
          {"AccumulatesByHand", AccumulatesByHand},
          {"ChangesRate", ChangesRate},
          {"WritesParameters", WritesParameters},
          {"FailsInBackward", FailsInBackward},
          {"Freezes", Freezes},
          {"SavesAndLoads", SavesAndLoads},
          {"LoadsWithoutStates", LoadsWithoutStates},
          {"Accumulates", Accumulates},
      };
  return *programs;
}

// args: "<program>|<TrainingSpec>". "<units stepped early>\n<record>".
TESSERA_RANK_FUNCTION(TrainProgram) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits('|', 1));
  const TrainingSpec spec = TrainingSpec::FromText(parts[1]);
  testdevice::Register({});  // before the CPU's first backward
  EarlyTrainee t;
  TESSERA_ASSIGN_OR_RETURN(static_cast<Trainee&>(t),
                           MakeWideOnDevice(spec, world.communicator()));
  Record record;
  int64_t early_units = 0;
  for (const auto& [name, program] : Programs()) {
    for (int step = 0; name == parts[0] && step < spec.steps; ++step) {
      t.awaits_begun = early_units == 0;
      TESSERA_RETURN_IF_ERROR(program(&t, step, &record));
      const StepReport& report = t.engine->last_step();
      early_units += report.offload.early_units;
      record.push_back(absl::StrCat(report.skipped, " ", report.grad_norm));
    }
  }
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  TESSERA_RETURN_IF_ERROR(CheckFaults(spec));
  return absl::StrCat(early_units, "\n", ToText(record));
}

const OffloadWay kWays[] = {
    {"States", 1, -1, "off", "off"},
    {"StatesShared", 1, -1, "on", "off"},
    {"StatesServed", 1, -1, "off", "on"},
    kAllOnDisk,
};

class EarlyStepTest
    : public ::testing::TestWithParam<std::pair<std::string, Program>> {
 protected:
  // Returns the number of units that each rank stepped early; expects the rest
  // to equal a run without a disk.
  std::vector<int64_t> Train(const std::string& program, TrainingSpec spec) {
    spec.steps = steps_;
    auto got = RunOnRanks(kRanks, "TrainProgram",
                          absl::StrCat(program, "|", spec.ToText()));
    std::vector<int64_t> early;
    for (const std::string& line : TakeFirstLines(&got)) {
      early.push_back(-1);
      EXPECT_TRUE(absl::SimpleAtoi(line, &early.back())) << line;
    }
    const std::vector<std::string>& expected = WithoutADisk(program, spec);
    for (size_t r = 0; r < kRanks; ++r) {
      EXPECT_EQ(
          FirstDifference(RecordFromText(expected[r]), RecordFromText(got[r])),
          "")
          << program << " " << spec.ToText() << ", rank " << r;
    }
    return early;
  }
  // The result does not depend on how units are gathered, nor on the stage.
  static const std::vector<std::string>& WithoutADisk(
      const std::string& program, TrainingSpec spec) {
    spec.states_on_disk = spec.parameters_in_memory = -1;
    spec.gradients_on_disk = false;
    spec.stage = 3;
    spec.tier = "nvme";
    spec.shared = spec.served = "off";
    static auto* const known =
        new std::map<std::string, std::vector<std::string>>;
    const std::string args = absl::StrCat(program, "|", spec.ToText());
    const auto [it, is_new] = known->try_emplace(args);
    if (is_new) {
      it->second = RunOnRanks(kRanks, "TrainProgram", args);
      EXPECT_THAT(TakeFirstLines(&it->second), Each("0"));
    }
    return it->second;
  }
  static size_t NumberOf(const std::pair<std::string, Program>& program) {
    size_t number = 0;
    while (Programs()[number] != program) ++number;
    return number;
  }
  static TrainingSpec OnHost(const char* dtype, const char* device, int stage) {
    TrainingSpec spec;
    spec.tier = "cpu";
    spec.stage = stage;
    spec.dtype = dtype;
    spec.device = device;
    spec.states_on_disk = 1;
    if (stage == 3) spec.parameters_in_memory = *dtype == 'b' ? 0 : -1;
    spec.poison = true;
    return spec;
  }
  std::vector<int64_t> Clipped(TrainingSpec spec, double bound, int steps) {
    spec.clipping = bound;
    steps_ = steps;
    return Train("Plain", spec);
  }
  static void MakeOverflow(TrainingSpec* spec) {
    spec->dtype = "fp16";
    spec->initial_scale_power = 20;
    spec->loss_scale_window = 2;
    spec->hysteresis = 1;
  }
  static constexpr int kRanks = 2;
  int steps_ = 12;
};

// Each way and dtype in turn; another program has the others.
TEST_P(EarlyStepTest, HasTheBitsOfTheSameWithoutADisk) {
  steps_ = 9;  // in which every program does all that it does
  size_t turn = NumberOf(GetParam());
  for (const OffloadWay& way : kWays) {
    const bool narrow = turn++ % 2 != 0;
    TrainingSpec spec = way.Spec(narrow ? "bf16" : "fp32");
    spec.poison = true;
    spec.gradients_on_disk = narrow;
    EXPECT_THAT(Train(GetParam().first, spec), Each(Gt(0))) << way.name;
    if (HasFailure()) return;
  }
}

// Clipping that changes gradients in place would make early steps useless.
class ClippedTest : public EarlyStepTest {};

TEST_P(ClippedTest, StepsAreNotMadeEarly) {
  TrainingSpec spec = kAllOnDisk.Spec("fp32");
  if (GetParam().first == "Values") {
    spec.clipping_value = 1e-6;
  } else {
    spec.optimizer +=
        ",param_groups{parameters:'*.bias',gradient_clipping:0.0001}";
  }
  EXPECT_THAT(Train("Plain", spec), Each(0));
}

INSTANTIATE_TEST_SUITE_P(Kinds, ClippedTest,
                         ::testing::Values(std::pair("Values", &Plain),
                                           std::pair("Groups", &Plain)),
                         [](const auto& info) { return info.param.first; });

// States are on the host, and the device decides whether the step was the right
// one.
TEST_P(EarlyStepTest, HasTheBitsOfADeviceWithoutAHost) {
  const TrainingSpec specs[] = {OnHost("fp32", "1/workers", 3),
                                OnHost("bf16", "1", 3), OnHost("fp32", "1", 2),
                                OnHost("bf16", "1/workers", 1)};
  steps_ = 9;
  const size_t first = NumberOf(GetParam()) % 2 * 2;
  for (const size_t i : {first, first + 1}) {
    EXPECT_THAT(Train(GetParam().first, specs[i]), Each(Gt(0)))
        << specs[i].ToText();
    if (HasFailure()) return;
  }
}

// All but the last, which differs from the first where micro-batches are added
// up (TheLastMicroBatchIsWhatCounts).
INSTANTIATE_TEST_SUITE_P(All, EarlyStepTest,
                         ::testing::ValuesIn(Programs().begin(),
                                             Programs().end() - 1),
                         [](const auto& info) { return info.param.first; });

// The bound is exceeded in some steps: then what was predicted is made again,
// and nothing is predicted in the next. Where every step is clipped nothing
// ever is. Norms are between 1e-4 and 1e4, and on both sides of 5.6.
TEST_F(EarlyStepTest, ClippingIsForeseenFromTheLastStep) {
  TrainingSpec spec = OnDisk();
  for (const char* dtype : {"fp32", "bf16"}) {
    spec.dtype = dtype;
    EXPECT_THAT(Clipped(spec, 1e-4, 4), Each(0));
    EXPECT_THAT(Clipped(spec, 5.6, 12), Each(Gt(0)));
    EXPECT_THAT(Clipped(spec, 1e4, 4), Each(Gt(0)));
  }
}

// The device decides, and the host learns it after the early step.
TEST_F(EarlyStepTest, ClippingByADeviceIsForeseenToo) {
  for (const TrainingSpec& spec :
       {OnHost("fp32", "1", 3), OnHost("bf16", "1/workers", 2)}) {
    EXPECT_THAT(Clipped(spec, 1e-4, 4), Each(0));
    EXPECT_THAT(Clipped(spec, 5.6, 12), Each(Gt(0)));
  }
}

TEST_F(EarlyStepTest, OverflowsOfADeviceAreMadeUndone) {
  for (const int stage : {1, 3}) {
    TrainingSpec spec = OnHost("fp16", "1/workers", stage);
    MakeOverflow(&spec);
    EXPECT_THAT(Train("Plain", spec), Each(Gt(0)));
    spec.libtorch_exact = true;
    EXPECT_THAT(Train("ChangesRate", spec), Each(Gt(0)));
  }
}

TEST_F(EarlyStepTest, OverflowsAreMadeUndone) {
  TrainingSpec spec = OnDisk();
  MakeOverflow(&spec);
  EXPECT_THAT(Train("Plain", spec), Each(Gt(0)));
}

// Its part of the average is known before a step, and undone with it.
TEST_F(EarlyStepTest, OfScheduleFreeAdamW) {
  for (TrainingSpec spec : {OnDisk(), OnHost("fp16", "1/workers", 3)}) {
    spec.optimizer = "type:'AdamWScheduleFree',params{weight_decay:0.1,r:1}";
    MakeOverflow(&spec);
    for (const char* program : {"ChangesRate", "SavesAndLoads"}) {
      EXPECT_THAT(Train(program, spec), Each(Gt(0))) << spec.ToText();
    }
  }
}

TEST_F(EarlyStepTest, OtherKernelsLeaveTheGradientToTheStep) {
  TrainingSpec spec = OnDisk();
  spec.dtype = "fp16";  // has a factor
  spec.loss_scale = 64;
  spec.parameters_in_memory = -1;
  spec.libtorch_exact = true;
  EXPECT_THAT(Train("ChangesRate", spec), Each(Gt(0)));
}

TEST_F(EarlyStepTest, TheLastMicroBatchIsWhatCounts) {
  TrainingSpec spec = OnDisk();
  spec.accumulation = 3;
  for (const char* mode : {"each", "local"}) {
    spec.accumulation_mode = mode;
    const auto early = Train("Accumulates", spec);
    // The sum of earlier micro-batches is not the step's gradient yet.
    if (*mode == 'e') EXPECT_THAT(early, Each(0));
    if (*mode == 'l') EXPECT_THAT(early, Each(Gt(0)));
  }
}

}  // namespace
}  // namespace tessera
