// Schedule-free AdamW with an engine, besides what is so of each optimizer
// (optimizers_test.cc): the weights of its averages through checkpoints, what
// it is evaluated with, and parameters that come late.
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/optim/optimizer_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;

// Rates that rise and then fall, so that sum and largest rate both count.
TEST(ScheduleFreeTest, GoesOnWithTheWeightsOfItsAverage) {
  size_t number = 0;
  while (absl::string_view(kOptimizerCases[number].name) != "ScheduleFree") {
    ++number;
  }
  const auto train = [&](int world_size, const std::string& words) {
    return RunOnRanks(
        world_size, "TrainWith",
        absl::StrCat("optimizer=", number, " data=same warmup=3 ", words));
  };
  const std::string whole = train(1, "stage=0 steps=7")[0];
  EXPECT_THAT(whole, HasSubstr("parameter in.weight"));
  EXPECT_THAT(train(2, "stage=3 steps=7 moved=1"), Each(whole));
  for (const int saved : {2, 5}) {  // in the warm-up, and after it
    const TempFolder folder;
    const std::string dir = folder.path() + "/checkpoint";
    train(2, absl::StrCat("stage=3 steps=", saved, " save=", dir));
    const std::string rest =
        absl::StrCat(" first=", saved, " steps=", 7 - saved, " load=", dir);
    EXPECT_THAT(train(4, "stage=2" + rest), Each(whole)) << saved;
    EXPECT_THAT(train(1, "stage=0" + rest), Each(whole)) << saved;
    EXPECT_THAT(train(2, "stage=3 offload=nvme" + rest), Each(whole)) << saved;
  }
}

constexpr char kGroups[] =
    "type: 'AdamWScheduleFree' params { lr: 0.01 weight_decay: 0.1 } "
    "param_groups { name: 'first' parameters: '*0*weight' params { lr: 0.02 "
    "betas: 0.5 betas: 0.9 r: 1 } }";

// x by what is known of y and z: a difference, its product with a rounded
// number, and a sum, of float32.
absl::Status CheckAverage(const std::string& name, const at::Tensor& y,
                          const at::Tensor& z, const at::Tensor& x) {
  const bool first =
      absl::StrContains(name, "0") && absl::EndsWith(name, "weight");
  const at::Tensor from = y.to(at::kDouble);
  const at::Tensor way =
      (z.to(at::kDouble) - from) * (1 - 1 / (first ? 0.5 : 0.9));
  const at::Tensor expected = from + way;
  const at::Tensor bound = 0x1p-24 * (4 * way.abs() + 2 * expected.abs());
  const at::Tensor apart = (x.to(at::kDouble) - expected).abs();
  if (apart.gt(bound).any().item<bool>() || x.equal(y)) {
    return absl::InternalError(absl::StrCat("no average of ", name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> SwapInAndOut(Trainee* t) {
  Engine& engine = *t->engine;
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> before;
  const auto names = t->model->named_parameters().keys();
  for (const std::string& name : names) {
    TESSERA_ASSIGN_OR_RETURN(before[name].first, engine.Master(name));
    TESSERA_ASSIGN_OR_RETURN(before[name].second,
                             engine.OptimizerStateOf(name, "z"));
  }
  std::string record;
  TESSERA_RETURN_IF_ERROR(engine.SwapInAverages());
  for (const std::string& name : names) {
    const auto& [y, z] = before[name];
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor x, engine.Master(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor used, engine.Parameter(name));
    if (!used.equal(x.to(used.scalar_type()))) {
      return absl::InternalError(absl::StrCat(name, " is not published"));
    }
    if (absl::StartsWith(name, "unused.")) {
      if (!x.equal(y)) return absl::InternalError("was never stepped");
      continue;
    }
    TESSERA_RETURN_IF_ERROR(CheckAverage(name, y, z, x));
    absl::StrAppend(&record, name, " ",
                    absl::Hex(Fingerprint(x.const_data_ptr(),
                                          static_cast<int64_t>(x.nbytes()))),
                    "\n");
  }
  for (const absl::Status& refused :
       {engine.SwapInAverages(), engine.SaveCheckpoint("/nowhere")}) {
    TESSERA_RETURN_IF_ERROR(
        ExpectCode(absl::StatusCode::kFailedPrecondition, refused));
  }
  TESSERA_RETURN_IF_ERROR(engine.SwapOutAverages());
  for (const std::string& name : names) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor y, engine.Master(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor z,
                             engine.OptimizerStateOf(name, "z"));
    if (!y.equal(before[name].first) || !z.equal(before[name].second)) {
      return absl::InternalError(absl::StrCat(name, " has not come back"));
    }
  }
  return record;
}

// args: Words, and swaps. What the averages are, and the parameters at the end.
TESSERA_RANK_FUNCTION(Evaluate) {
  const Words words(args);
  proto::Config config = ConfigOf(words);
  TrainingSpec spec;
  spec.optimizer = kGroups;
  *config.mutable_optimizer() = ConfigOf(spec).optimizer();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel("Mlp", world.rank()), config,
                               world.communicator()));
  std::string record;
  for (int step = 0; step < 4; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    if (words.Get("swaps").empty() || step == 0) continue;
    TESSERA_ASSIGN_OR_RETURN(const std::string averages, SwapInAndOut(&t));
    absl::StrAppend(&record, averages);
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string end, t.Finish());
  return record + end;
}

TEST(ScheduleFreeTest, IsEvaluatedAtItsAverageAndTrainsOn) {
  for (const char* dtype : {"fp32", "bf16"}) {
    const std::string of = absl::StrCat(" dtype=", dtype);
    const std::string plain = RunOnRanks(2, "Evaluate", "stage=1" + of)[0];
    const std::string first =
        RunOnRanks(2, "Evaluate", "stage=0 swaps=1" + of)[0];
    EXPECT_THAT(first, AllOf(HasSubstr("in.weight "), EndsWith(plain)));
    for (const char* how : {"stage=1", "stage=3", "stage=3 offload=nvme"}) {
      EXPECT_THAT(RunOnRanks(2, "Evaluate", absl::StrCat(how, " swaps=1", of)),
                  Each(first))
          << how << of;
    }
  }
}

struct Pair : TestModel {
  Pair() {
    a = register_parameter("a", torch::ones({1}));
    b = register_parameter("b", torch::ones({1}));
  }
  at::Tensor Loss(int, int64_t) override { return 2 * (a.sum() + b.sum()); }
  at::Tensor a, b;
};

absl::StatusOr<Trainee> PairOf(const World& world, const std::string& group) {
  TrainingSpec spec;
  spec.stage = 2;
  spec.optimizer = absl::StrCat(
      "type:'AdamWScheduleFree',params{lr:0.25},param_groups{name:'", group,
      "',parameters:'b',frozen:true}");
  return Trainee::Make(std::make_shared<Pair>(), ConfigOf(spec),
                       world.communicator());
}

// b is thawed after two steps, and goes the way of a from there. args: a
// folder.
TESSERA_RANK_FUNCTION(Thaw) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, PairOf(world, "late"));
  std::vector<float> as, bs;
  for (int step = 0; step < 5; ++step) {
    if (step == 2) TESSERA_RETURN_IF_ERROR(t.engine->SetFrozen("late", false));
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor a, t.engine->Master("a"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor b, t.engine->Master("b"));
    as.push_back(a.item<float>());
    bs.push_back(b.item<float>());
  }
  std::string record = absl::StrCat(as[0], " ", as[1], "\n");
  for (size_t i = 2; i < bs.size(); ++i) {
    absl::StrAppend(&record, bs[i] == as[i - 2] ? "same" : "other", "\n");
  }
  const std::string folder(args);
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(folder));
  absl::StrAppend(&record, t.engine->SetOption("late", "beta1", 0.5).ToString(),
                  "\n", t.engine->SetOption("late", "r", 0.5).ToString(), "\n");
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  TESSERA_ASSIGN_OR_RETURN(Trainee other, PairOf(world, "other"));
  return absl::StrCat(record,
                      other.engine->LoadCheckpoint(folder).status().ToString());
}

// Gradients are of one size, so d is 1: y is 1 - 0.25, and then half of the way
// to z, which it is, less 0.25 * (1 - 0.9 / 2).
TEST(ScheduleFreeTest, AGroupThatIsThawedBeginsThen) {
  const TempFolder folder;
  EXPECT_THAT(
      RunOnRanks(2, "Thaw", folder.path() + "/saved"),
      Each(AllOf(
          HasSubstr("0.75 0.6125\nsame\nsame\nsame\nFAILED_PRECONDITION: "),
          HasSubstr("option 'beta1': the average is found by it"),
          HasSubstr("\nOK\nFAILED_PRECONDITION: "),
          HasSubstr("it has no weights of the average of the parameter group "
                    "'other'"))));
}

}  // namespace
}  // namespace tessera
