// Checkpoints of 16-bit runs: masters, the loss scaler's state and skipped
// steps, parameters that were unfrozen. A resumed run has the bits of one that
// did not stop.
#include <torch/torch.h>

#include <map>
#include <memory>
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
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/oracle.h"

namespace tessera {
namespace {

constexpr int kWorldSize = 2;

// "<spec>\n<folder>\n<steps before the checkpoint>\n<steps of the engine that
// loads it, before>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    dir = lines.at(1);
    TORCH_CHECK(absl::SimpleAtoi(lines.at(2), &before));
    TORCH_CHECK(absl::SimpleAtoi(lines.at(3), &other));
  }
  TrainingSpec spec;
  std::string dir;
  int before = 0, other = 0;
};

// Makes a model whose values at Create fit in 16 bits: what is frozen then has
// no master.
std::shared_ptr<TestModel> MakeRounded(const std::string& name) {
  auto model = MakeTestModel(name);
  torch::NoGradGuard no_grad;
  for (at::Tensor& p : model->parameters()) p.copy_(p.to(torch::kBFloat16));
  return model;
}

absl::StatusOr<Trainee> MakeTrainee(const TrainingSpec& spec, uint64_t seed,
                                    const World& world) {
  at::set_num_threads(1);
  torch::manual_seed(seed);
  auto model = MakeRounded(spec.model);
  torch::manual_seed(TrainingSpec::kRankSeed +
                     static_cast<uint64_t>(world.rank()));
  return Trainee::Make(model, ConfigOf(spec), world.communicator());
}

absl::Status AddState(Trainee& t, Record* record) {
  TESSERA_RETURN_IF_ERROR(AddFinalState(*t.engine, *t.model, record));
  for (const auto& p : t.model->named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor master, t.engine->Master(p.key()));
    record->push_back(ParameterLine(p.key(), master));
  }
  record->push_back(
      absl::StrCat("skipped ", t.engine->last_step().skipped_steps));
  return t.engine->Close();
}

// All steps at once.
TESSERA_RANK_FUNCTION(TrainThrough) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, MakeTrainee(a.spec, TrainingSpec::kModelSeed, world));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, a.spec, t.rank, 0, &record));
  TESSERA_RETURN_IF_ERROR(AddState(t, &record));
  return ToText(record);
}

// Some steps; then another model, of other values, that has trained with other
// data, continues from the checkpoint.
TESSERA_RANK_FUNCTION(TrainAndResume) {
  const Args a(args);
  Record record;
  {
    TESSERA_ASSIGN_OR_RETURN(
        Trainee t, MakeTrainee(a.spec, TrainingSpec::kModelSeed, world));
    TrainingSpec before = a.spec;
    before.steps = a.before;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*t.engine, *t.model, before, t.rank, 0, &record));
    TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
    TESSERA_RETURN_IF_ERROR(t.engine->Close());
  }
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(a.spec, 99, world));
  TrainingSpec other = a.spec;
  other.steps = a.other;
  Record unused;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, other, 5 + t.rank, 0, &unused));
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(a.dir).status());
  if (a.spec.model == "Thawed") {  // the user freezes it or not
    t.parameter("frozen.weight").requires_grad_(a.before > 1);
  }
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, a.spec, t.rank, a.before, &record));
  TESSERA_RETURN_IF_ERROR(AddState(t, &record));
  return ToText(record);
}

class CheckpointPrecisionTest : public ::testing::TestWithParam<int> {
 protected:
  CheckpointPrecisionTest() {
    spec_.stage = GetParam();
    spec_.outcomes = true;
  }

  void ExpectResumed(int before, int other = 2) {
    const std::string args = absl::StrCat(
        spec_.ToText(), "\n", folder_ / "ckpt", "\n", before, "\n", other);
    SCOPED_TRACE(args);
    if (trained_ != spec_.ToText()) {  // one for several places to stop at
      trained_ = spec_.ToText();
      through_ = RunOnRanks(kWorldSize, "TrainThrough", args);
    }
    const std::vector<std::string> resumed =
        RunOnRanks(kWorldSize, "TrainAndResume", args);
    for (int rank = 0; rank < kWorldSize; ++rank) {
      EXPECT_GT(RecordFromText(through_[rank]).size(), 10u) << through_[rank];
      EXPECT_EQ(FirstDifference(RecordFromText(through_[rank]),
                                RecordFromText(resumed[rank])),
                "");
    }
  }
  // Whether this stage runs a cell of a test: half of them, with every pair of
  // values, and the next stage runs the others. `sum` is of their indices.
  bool Runs(int sum) const { return (sum + GetParam()) % 2 == 0; }

  const TempFolder folder_;
  TrainingSpec spec_;

 private:
  std::string trained_;  // what `through_` is of
  std::vector<std::string> through_;
};
INSTANTIATE_TEST_SUITE_P(All, CheckpointPrecisionTest,
                         ::testing::Values(0, 1, 2, 3), [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST_P(CheckpointPrecisionTest, MastersGoOn) {
  spec_.model = "Attention";  // dropout
  spec_.steps = 5;
  spec_.initial_scale_power = 8;
  spec_.clipping = 0.5;
  for (const bool half : {false, true}) {
    spec_.dtype = half ? "fp16" : "bf16";
    for (bool fp32_norms : {false, true}) {
      if (!Runs((half ? 1 : 0) + (fp32_norms ? 1 : 0))) continue;
      spec_.fp32_norms = spec_.narrow_masters = fp32_norms;
      ExpectResumed(3);
    }
  }
  spec_.dtype = "bf16";
  spec_.fp32_norms = true;
  spec_.narrow_masters = false;
  spec_.remainder_masters = true;
  ExpectResumed(3);
}

// Checks the masters of an engine against those that were `saved`, if any, and
// replaces them.
absl::Status CheckMaster(Engine& engine, const std::string& name,
                         at::ScalarType dtype, at::Tensor* saved) {
  TESSERA_ASSIGN_OR_RETURN(at::Tensor master, engine.Master(name));
  if (master.scalar_type() != dtype) {
    return absl::InternalError(absl::StrCat(
        name, " is of ", std::string(c10::toString(master.scalar_type()))));
  }
  // What was rounded to the other dtype once stays so.
  const bool rounds = saved->defined() &&
                      (saved->scalar_type() != dtype || dtype == at::kBFloat16);
  if (saved->defined() &&
      !master.equal(rounds ? saved->to(at::kBFloat16).to(dtype) : *saved)) {
    return absl::InternalError(absl::StrCat(name, " is another"));
  }
  *saved = master;
  return absl::OkStatus();
}

absl::Status CheckMoment(Engine& engine, const std::string& name,
                         at::Tensor* saved) {
  TESSERA_ASSIGN_OR_RETURN(at::Tensor moment,
                           engine.OptimizerStateOf(name, "exp_avg"));
  if (saved->defined() && !moment.equal(*saved)) {
    return absl::InternalError(absl::StrCat(name, "'s moment"));
  }
  *saved = moment;
  return absl::OkStatus();
}

absl::Status CheckIsNearMaster(Engine& engine, const std::string& name,
                               const at::Tensor& master) {
  TESSERA_ASSIGN_OR_RETURN(at::Tensor value, engine.Parameter(name));
  const at::Tensor far =
      (value.to(at::kFloat) - master).abs().gt(master.abs() / 256);
  return far.any().item<bool>()
             ? absl::InternalError(absl::StrCat(name, " is not near it"))
             : absl::OkStatus();
}

// One engine after the other loads what the last one saved; their masters are,
// in turn, whole or of 16 bits (with `narrow_masters`), or whole or in two
// halves. Masters of float32 are rounded where 16 bits are kept; the
// optimizer's states and, in two halves, masters stay what they were.
TESSERA_RANK_FUNCTION(LoadWithOtherMasters) {
  const Args a(args);
  const bool narrows = a.spec.narrow_masters;
  std::map<std::string, at::Tensor> masters, moments;
  for (const bool other : {false, true, false, true, true}) {
    TrainingSpec spec = a.spec;
    spec.narrow_masters = narrows && other;
    spec.remainder_masters = !narrows && other;
    TESSERA_ASSIGN_OR_RETURN(
        Trainee t, MakeTrainee(spec, TrainingSpec::kModelSeed, world));
    if (masters.empty()) {
      Record unused;
      TESSERA_RETURN_IF_ERROR(
          TrainSteps(*t.engine, *t.model, spec, t.rank, 0, &unused));
    } else {
      TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(a.dir).status());
    }
    for (const auto& p : t.model->named_parameters()) {
      at::Tensor& master = masters[p.key()];
      TESSERA_RETURN_IF_ERROR(CheckMaster(
          *t.engine, p.key(), spec.narrow_masters ? at::kBFloat16 : at::kFloat,
          &master));
      TESSERA_RETURN_IF_ERROR(
          CheckMoment(*t.engine, p.key(), &moments[p.key()]));
      TESSERA_RETURN_IF_ERROR(
          CheckIsNearMaster(*t.engine, p.key(), master.to(at::kFloat)));
    }
    TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
    TESSERA_RETURN_IF_ERROR(t.engine->Close());
  }
  return "";
}

TEST_P(CheckpointPrecisionTest, RemaindersAreSavedAsWholeMasters) {
  spec_.dtype = "bf16";
  EXPECT_THAT(RunOnRanks(kWorldSize, "LoadWithOtherMasters",
                         absl::StrCat(spec_.ToText(), "\n", folder_ / "ckpt",
                                      "\n0\n0")),
              ::testing::Each(""));
}

TEST_P(CheckpointPrecisionTest, MastersOfAnotherDtypeAreLoaded) {
  spec_.dtype = "bf16";
  spec_.narrow_masters = true;
  EXPECT_THAT(RunOnRanks(kWorldSize, "LoadWithOtherMasters",
                         absl::StrCat(spec_.ToText(), "\n", folder_ / "ckpt",
                                      "\n0\n0")),
              ::testing::Each(""));
}

// The run stops before each of the steps in which the scale falls, waits and
// rises. A skipped step does not count as one, but micro-batches go on.
TEST_P(CheckpointPrecisionTest, TheLossScaleGoesOn) {
  spec_.model = "Overflows";
  spec_.steps = 9;
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 8;
  spec_.loss_scale_window = 2;
  spec_.hysteresis = 2;
  for (int before : {2, 3, 5, 6, 7}) ExpectResumed(before);
}

TEST_P(CheckpointPrecisionTest, SkippedStepsOfBf16GoOn) {
  spec_.model = "Overflows";
  spec_.steps = 4;
  spec_.dtype = "bf16";
  ExpectResumed(2);
}

// Parameters are unfrozen before the checkpoint or after it; in the other
// engine they are still frozen or no longer.
TEST_P(CheckpointPrecisionTest, UnfrozenParametersGoOn) {
  spec_.model = "Thawed";
  spec_.steps = 5;
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (int before : {1, 3}) {
      for (int other : {0, 1, 3}) {
        const int sum = (*dtype == 'b' ? 1 : 0) + before / 2 + (other + 1) / 2;
        if (Runs(sum)) ExpectResumed(before, other);
      }
    }
    spec_.narrow_masters = spec_.dtype == "bf16";
    if (spec_.narrow_masters) ExpectResumed(3, 1);
    spec_.remainder_masters = std::exchange(spec_.narrow_masters, false);
    if (spec_.remainder_masters) ExpectResumed(3, 1);
    spec_.remainder_masters = false;
  }
}

}  // namespace
}  // namespace tessera
