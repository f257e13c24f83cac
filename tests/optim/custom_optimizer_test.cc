// Tests a program's own optimizer with an engine: it has the bits of libtorch's
// classes on whole parameters, however these are sharded, wherever they lie,
// and after a checkpoint. Also tests what else belongs to a step, and errors.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/plan/plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/optim/custom_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "verify/verify.h"

namespace tessera {
namespace {

// Trains `steps` steps from `first` on; saves at the end, or loads before.
TESSERA_RANK_FUNCTION(TrainOwn) {
  const Words words(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeOwn(words, world));
  if (!words.Get("load").empty()) {
    TESSERA_RETURN_IF_ERROR(
        t.engine->LoadCheckpoint(words.Get("load")).status());
  }
  const int first = std::stoi(words.Get("first", "0"));
  const int steps = std::stoi(words.Get("steps", "3"));
  const int accumulation = std::stoi(words.Get("accumulation", "1"));
  std::string skipped;
  for (int i = first * accumulation; i < (first + steps) * accumulation; ++i) {
    const int of = words.Get("data") == "same" ? 0 : world.rank();
    if (i == accumulation && !words.Get("set").empty()) {
      TESSERA_RETURN_IF_ERROR(t.engine->SetOption("default", "lr", 0.05));
      TESSERA_RETURN_IF_ERROR(t.engine->SetOption("first", "beta1", 0.25));
    }
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(t.model->Loss(of, i)));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
    absl::StrAppend(&skipped, t.engine->last_step().skipped ? "s" : "m");
  }
  if (!words.Get("save").empty()) {
    TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(words.Get("save")));
  }
  if (!words.Get("many").empty()) {
    TESSERA_RETURN_IF_ERROR(t.engine->SwapInAverages());
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor average,
                             t.engine->Parameter("in.weight"));
    absl::StrAppend(&skipped, PrintOf(average));
    TESSERA_RETURN_IF_ERROR(t.engine->SwapOutAverages());
  }
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(parameters, "\nsteps ", skipped);
}

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Trains the same model in one process with the class itself.
std::string TrainPlainly(const std::string& name, int steps) {
  const auto model = BuildModel("Mlp", 0);
  const auto optimizer = MakePlain(name, model->parameters());
  for (int i = 0; i < steps; ++i) {
    optimizer->zero_grad();
    model->Loss(0, i).backward();
    optimizer->step();
  }
  Record record;
  for (const auto& p : model->named_parameters()) {
    record.push_back(ParameterLine(p.key(), p.value().detach()));
  }
  std::sort(record.begin(), record.end());
  return ToText(record);
}

// Returns the answer without the line of the steps, in one order.
std::string ParametersIn(const std::string& answer) {
  Record record = RecordFromText(answer.substr(0, answer.find("\nsteps ")));
  std::sort(record.begin(), record.end());
  return ToText(record);
}

class CustomTest : public ::testing::TestWithParam<const char*> {};

TEST_P(CustomTest, HasTheBitsOfTheClassOnWholeParameters) {
  const std::string own = absl::StrCat("data=same own=", GetParam());
  const std::string plain = TrainPlainly(GetParam(), 3);
  EXPECT_THAT(plain, HasSubstr("parameter in.weight"));
  for (const char* how :
       {"stage=0", "stage=1", "stage=3", "stage=3 offload=nvme"}) {
    for (const int world_size : {1, 2}) {
      for (const std::string& answer :
           Train(world_size, absl::StrCat(how, " ", own))) {
        EXPECT_EQ(ParametersIn(answer), plain) << how << " " << world_size;
      }
    }
  }
}

TEST_P(CustomTest, HasTheSameBitsHoweverItIsSharded) {
  const std::string own = absl::StrCat(" own=", GetParam());
  const std::vector<std::string> replicated = Train(3, "stage=0" + own);
  EXPECT_THAT(replicated,
              Each(AllOf(replicated[0], HasSubstr("parameter in.weight"))));
  for (const char* how : {"stage=1", "stage=3"}) {
    EXPECT_EQ(Train(3, how + own), replicated) << how;
  }
}

INSTANTIATE_TEST_SUITE_P(, CustomTest,
                         ::testing::Values("sgd", "adagrad", "rmsprop", "adam",
                                           "adamw", "fading", "bound"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

class SavedCustomTest : public CustomTest {};

// Saved by two ranks, gone on with by one and three, whose gradients in the
// mean are theirs where all have the same data and it is a power of two.
TEST_P(SavedCustomTest, GoesOnFromACheckpoint) {
  const TempFolder folder;
  const std::string own = absl::StrCat(" data=same own=", GetParam());
  const std::string whole = Train(1, "stage=0 steps=4" + own)[0];
  const std::string dir = folder.path() + "/checkpoint";
  Train(2, absl::StrCat("stage=3 steps=2 save=", dir, own));
  const std::string on = absl::StrCat(" first=2 steps=2 load=", dir, own);
  EXPECT_EQ(ParametersIn(Train(1, "stage=0" + on)[0]), ParametersIn(whole));
  for (const char* how : {"stage=1", "stage=3 offload=nvme"}) {
    for (const std::string& answer : Train(4, how + on)) {
      EXPECT_EQ(ParametersIn(answer), ParametersIn(whole)) << how;
    }
  }
  const std::vector<std::string> three = Train(3, "stage=0" + on);
  EXPECT_THAT(three, Each(HasSubstr("parameter in.weight")));
  EXPECT_EQ(Train(3, "stage=3" + on), three);
}

INSTANTIATE_TEST_SUITE_P(, SavedCustomTest,
                         ::testing::Values("own", "sgd", "adagrad", "rmsprop",
                                           "adam", "bound"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

// All that is around the call.
TEST(CustomStepTest, IsAsThatOfTheEnginesAdamW) {
  for (const std::string& words :
       {"", "dtype=bf16 clipping=yes", "dtype=fp16 steps=20 clipping=yes",
        "many=yes accumulation=2", "many=yes set=yes dtype=bf16",
        "many=yes schedule=yes dtype=fp16 steps=20"}) {
    const std::vector<std::string> exact =
        Train(2, absl::StrCat("stage=1 own=exact ", words));
    EXPECT_THAT(exact, Each(HasSubstr("parameter in.weight"))) << words;
    if (words.find("fp16") != words.npos) {
      EXPECT_THAT(exact, Each(AllOf(HasSubstr("steps s"), HasSubstr("sm"))));
    }
    for (const char* how : {"stage=1", "stage=3", "stage=3 offload=nvme"}) {
      EXPECT_EQ(Train(2, absl::StrCat(how, " own=own ", words)), exact)
          << how << " " << words;
    }
    EXPECT_EQ(Train(3, absl::StrCat("stage=3 own=own ", words)),
              Train(3, absl::StrCat("stage=1 own=exact ", words)));
  }
}

// ---- what a step receives

TESSERA_RANK_FUNCTION(TellSteps) {
  EngineOptions options;
  options.communicator = world.communicator();
  options.optimizer = OwnAdamW();
  int64_t numel = 0, calls = 0;
  std::string told;
  options.optimizer->step = [&](const CustomStep& s) {
    ++calls;
    numel += s.end - s.begin;
    if (s.parameter == "in.weight" && s.begin == 0) {
      absl::StrAppend(&told, s.step, " of ", s.sizes.size(), " dims, group ",
                      s.group, ", ", s.states.size(), " states, ", s.options.lr,
                      "\n");
    }
    const bool good = s.master.numel() == s.end - s.begin &&
                      s.gradient.sizes() == s.master.sizes() &&
                      s.states[1].sizes() == s.master.sizes() &&
                      !at::GradMode::is_enabled();
    return good ? absl::OkStatus() : absl::InternalError("other sizes");
  };
  const Words words("own=own stage=3");
  Trainee t;
  t.rank = world.rank();
  t.model = BuildModel("Mlp", world.rank());
  TESSERA_ASSIGN_OR_RETURN(
      t.engine, Engine::Create(t.model, OwnConfigOf(words), options));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  int64_t expected = 0;
  for (const auto& p : t.model->named_parameters()) {
    if (p.key().rfind("unused.", 0) != 0) expected += 2 * p.value().numel();
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  at::Tensor sum = at::full({1}, numel, at::kLong);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(sum, {"elements"}).Wait());
  return absl::StrCat(told, sum.item<int64_t>() - expected);
}

TEST(CustomStepTest, IsToldWhatItSteps) {
  EXPECT_EQ(RunOnRanks(2, "TellSteps", "")[0],
            "1 of 2 dims, group 0, 2 states, 0.1\n"
            "2 of 2 dims, group 0, 2 states, 0.1\n0");
}

// ---- errors

// args: "status" or "exception", of rank 1 alone or of all, and where states
// lie. What Step says, and what follows.
TESSERA_RANK_FUNCTION(FailOwn) {
  const Words words(args);
  EngineOptions options;
  options.communicator = world.communicator();
  options.optimizer = OwnAdamW();
  const bool fails = words.Get("of") == "all" || world.rank() == 1;
  options.optimizer->step = [&](const CustomStep& s) -> absl::Status {
    if (!fails || s.step < 2) return absl::OkStatus();
    if (words.Get("by") == "exception") throw std::runtime_error("burnt");
    return absl::OutOfRangeError("burnt");
  };
  Trainee t;
  t.rank = world.rank();
  t.model = BuildModel("Mlp", world.rank());
  TESSERA_ASSIGN_OR_RETURN(
      t.engine, Engine::Create(t.model, OwnConfigOf(words), options));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  // At stage 3 a forward throws the error.
  const auto step = [&](int64_t i) {
    return CatchTorch("step", [&] { return t.TrainStep(i); });
  };
  absl::Status failed = step(1);
  if (failed.ok()) failed = step(2);  // of a stream: behind it
  return absl::StrCat(failed.message(), "\n",
                      step(3).ok() ? "goes on" : "is lost");
}

TEST(CustomErrorTest, EndsTheStepOnAllRanks) {
  int cell = 0;  // every second one, in which every pair occurs
  for (const char* of : {"all", "one"}) {
    ++cell;
    for (const char* by : {"status", "exception"}) {
      for (const char* how : {"stage=1", "stage=3", "stage=3 offload=nvme"}) {
        if (cell++ % 2 != 0) continue;
        const std::string words =
            absl::StrCat("own=own of=", of, " by=", by, " ", how);
        EXPECT_THAT(RunOnRanks(2, "FailOwn", words),
                    Each(AllOf(HasSubstr("optimizer 'own adamw', parameter '"),
                               HasSubstr("burnt"), HasSubstr("is lost"))))
            << words;
      }
    }
  }
}

// args: what is wrong.
TESSERA_RANK_FUNCTION(MakeWrong) {
  EngineOptions options;
  options.communicator = world.communicator();
  options.optimizer = OwnAdamW();
  proto::Config config = OwnConfigOf(Words("own=own stage=1"));
  if (args == "function") options.optimizer->step = nullptr;
  if (args == "name") options.optimizer->name = "";
  if (args == "twice") options.optimizer->states = {"a", "a"};
  if (args == "reserved") options.optimizer->states = {"ema"};
  if (args == "many") options.optimizer->states.assign(9, "a");
  if (args == "ranks" && world.rank() == 1) options.optimizer->states = {"a"};
  if (args == "none") options.optimizer.reset();
  if (args == "type") config = OwnConfigOf(Words("own=exact"));
  if (args == "decay") {
    TESSERA_ASSIGN_OR_RETURN(options.optimizer, OptimizerOf("sgd"));
  }
  return Engine::Create(BuildModel("Mlp", world.rank()), config, options)
      .status()
      .ToString();
}

TEST(CustomErrorTest, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"function", "it has no function"},
      {"name", "it has no name"},
      {"twice", "there are two states 'a'"},
      {"reserved", "neither 'value' nor 'ema'"},
      {"many", "expected at most 8 states, got 9"},
      {"ranks", "list of parameter groups"},
      {"none", "expected a program's own, EngineOptions::optimizer"},
      {"type", "expected \"optimizer\": {\"type\": \"Custom\"}"},
      {"decay", "reads only lr"},
  };
  for (const auto& [wrong, message] : cases) {
    EXPECT_THAT(RunOnRanks(2, "MakeWrong", wrong), Each(HasSubstr(message)))
        << wrong;
  }
}

TESSERA_RANK_FUNCTION(SaveOwnStates) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           MakeOwn(Words("own=fading stage=3"), world));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const std::string refused =
      t.engine->SaveCheckpoint(std::string(args)).ToString();
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return absl::StrCat(refused, "\n",
                      t.engine->SetOption("default", "momentum", 1).ToString());
}

TEST(CustomErrorTest, StatesOfAClassAreNotSavedUnseen) {
  const TempFolder folder;
  EXPECT_THAT(RunOnRanks(2, "SaveOwnStates", folder.path() + "/checkpoint"),
              Each(AllOf(HasSubstr("'fading' keeps states of its own"),
                         HasSubstr("option 'momentum': Custom has no such"))));
}

// Two states of float32 at stage 0, as the plan has them; plain training knows
// no program's own.
TEST(CustomPlanTest, CountsStates) {
  const auto model = BuildModel("Mlp", 0);
  int64_t numel = 0;
  for (const at::Tensor& p : model->parameters()) numel += p.numel();
  const proto::Config config = OwnConfigOf(Words("own=own"));
  const auto plan = [&](const PlanOptions& options) {
    return Plan(
        *model, [&] { return model->Loss(0, 0); }, config, options);
  };
  PlanOptions options;
  EXPECT_THAT(plan(options).status().ToString(),
              HasSubstr("optimizer.type: Custom: expected a program's own"));
  options.optimizer = OwnAdamW();
  const auto two = plan(options);
  ASSERT_TRUE(two.ok()) << two.status();
  options.optimizer->states.clear();
  const auto none = plan(options);
  ASSERT_TRUE(none.ok()) << none.status();
  const auto bytes = [](const PlanReport& report) {
    return report.stages[0].between_steps[PlanKind::kOptimizer];
  };
  EXPECT_EQ(bytes(*none), 0);
  EXPECT_GE(bytes(*two), 2 * 4 * numel);
  EXPECT_LT(bytes(*two), 2 * 4 * (numel + 64 * 30));  // and gaps
}

TESSERA_RANK_FUNCTION(VerifyOwn) {
  VerifyOptions options;
  options.engine.communicator = world.communicator();
  options.engine.optimizer = OwnAdamW();
  return Verify([] { return MakeTestModel("Mlp"); },
                OwnConfigOf(Words("own=own")), OwnLoss(), options)
      .status()
      .ToString();
}

TEST(CustomErrorTest, PlainTrainingDoesNotKnowIt) {
  EXPECT_THAT(RunOnRanks(2, "VerifyOwn", ""),
              Each(AllOf(HasSubstr("UNIMPLEMENTED"),
                         HasSubstr("optimizer.type Custom"))));
}

// States of another optimizer do not count as its own.
TEST(CustomErrorTest, StatesOfAnotherAreNotLoaded) {
  const TempFolder folder;
  const std::string dir = folder.path() + "/checkpoint";
  Train(2, "stage=3 steps=1 own=own save=" + dir);
  EXPECT_THAT(
      Train(2, "stage=3 steps=1 own=adamw load=" + dir),
      Each(AllOf(HasSubstr("'own adamw(exp_avg,exp_avg_sq)'"),
                 HasSubstr("'torch::optim::AdamW(exp_avg,exp_avg_sq)'"))));
}

}  // namespace
}  // namespace tessera
