// Groups of parameters, their options and averages, by hand with weights of one
// element: what each is stepped with, what checkpoints keep of it, and what is
// wrong in one line each.
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Net : TestModel {
  Net() {
    a = register_parameter("a", torch::ones({1}));
    b = register_parameter("b", torch::ones({1}));
    norm =
        register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{3}));
  }
  at::Tensor Loss(int, int64_t) override {
    const at::Tensor x = norm->forward(torch::arange(3, at::kFloat));
    return 2 * a.sum() + 3 * b.sum() + x.square().sum();
  }
  at::Tensor a, b;
  torch::nn::LayerNorm norm{nullptr};
};

proto::Config SgdConfig(int accumulation = 1) {
  TrainingSpec spec;
  spec.accumulation = accumulation;
  spec.optimizer = "type:'SGD',params{lr:0.5}";
  return ConfigOf(spec);
}

absl::StatusOr<std::unique_ptr<Engine>> EngineOf(
    std::shared_ptr<Net> net, const proto::Config& config,
    const std::vector<ParameterGroup>& groups, const World& world) {
  EngineOptions options;
  options.communicator = world.communicator();
  options.param_groups = groups;
  return Engine::Create(std::move(net), config, options);
}

absl::Status StepOnce(Engine* engine, Net* net) {
  TESSERA_RETURN_IF_ERROR(engine->Backward(net->Loss(0, 0)));
  return engine->Step();
}

// The gradient of a is 2, of b 3; the masters after each change.
TESSERA_RANK_FUNCTION(SetOptions) {
  auto net = std::make_shared<Net>();
  proto::Config config = SgdConfig();
  proto::ParamGroup* const group =
      config.mutable_optimizer()->add_param_groups();
  group->set_name("second");
  group->add_parameters("b");
  group->mutable_params()->set_lr(0.25);
  ParameterGroup norms;
  norms.name = "norms";
  norms.modules = {"LayerNorm"};
  norms.frozen = true;
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           EngineOf(net, config, {norms}, world));
  std::string record =
      absl::StrCat(absl::StrJoin(engine->GroupNames(), ","), "\n");
  const auto step = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(StepOnce(engine.get(), net.get()));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor a, engine->Master("a"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor b, engine->Master("b"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor w, engine->Master("norm.weight"));
    absl::StrAppend(&record, a.item<float>(), " ", b.item<float>(), " ",
                    w.equal(torch::ones({3})) ? "frozen" : "moved");
    for (const auto& g : engine->last_step().groups) {
      absl::StrAppend(&record, " ", g.name, ":", g.learning_rate);
    }
    absl::StrAppend(&record, "\n");
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(step());  // a: 1 - .5 * 2, b: 1 - .25 * 3
  TESSERA_RETURN_IF_ERROR(engine->SetOption("second", "lr", 1));
  TESSERA_RETURN_IF_ERROR(engine->SetOption("default", "weight_decay", 1));
  TESSERA_RETURN_IF_ERROR(step());  // a: 0 - .5 * (2 + 0), b: .25 - 3
  TESSERA_RETURN_IF_ERROR(engine->SetFrozen("second", true));
  TESSERA_RETURN_IF_ERROR(engine->SetFrozen("norms", false));
  TESSERA_RETURN_IF_ERROR(step());  // a: -1 - .5 * (2 - 1)
  TESSERA_RETURN_IF_ERROR(engine->SetFrozen("second", false));
  TESSERA_RETURN_IF_ERROR(engine->SetLearningRate(0));
  TESSERA_RETURN_IF_ERROR(step());
  TESSERA_RETURN_IF_ERROR(engine->SetOption("second", "lr", 1));
  TESSERA_RETURN_IF_ERROR(step());  // b: -2.75 - 3
  return record;
}

TEST(ParameterGroupsTest, HaveTheirOwnOptions) {
  EXPECT_THAT(RunOnRanks(2, "SetOptions", ""),
              Each("default,norms,second\n"
                   "0 0.25 frozen default:0.5 norms:0.5 second:0.25\n"
                   "-1 -2.75 frozen default:0.5 norms:0.5 second:1\n"
                   "-1.5 -2.75 moved default:0.5 norms:0.5 second:1\n"
                   "-1.5 -2.75 moved default:0 norms:0 second:0\n"
                   "-1.5 -5.75 moved default:0 norms:0 second:1\n"));
}

// args: the stage. The average of a (which begins as 1, with gradients of 2 and
// a rate of 0.25), where it is swapped in, and what may not be done then.
TESSERA_RANK_FUNCTION(Averages) {
  auto net = std::make_shared<Net>();
  proto::Config config = SgdConfig();
  config.mutable_zero_optimization()->set_stage(std::stoi(std::string(args)));
  config.mutable_optimizer()->mutable_params()->set_lr(0.25);
  config.mutable_optimizer()->mutable_params()->set_ema_decay(0.75);
  TESSERA_ASSIGN_OR_RETURN(const auto engine, EngineOf(net, config, {}, world));
  std::string record;
  const auto say = [&](absl::string_view name) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor a, engine->Parameter("a"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor ema,
                             engine->OptimizerStateOf("a", "ema"));
    absl::StrAppend(&record, name, ": ", a.item<float>(), " ",
                    ema.item<float>(), "\n");
    return absl::OkStatus();
  };
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(StepOnce(engine.get(), net.get()));
    TESSERA_RETURN_IF_ERROR(say("step"));
  }
  TESSERA_RETURN_IF_ERROR(engine->SwapInAverages());
  TESSERA_RETURN_IF_ERROR(say("in"));
  for (const absl::Status& status :
       {engine->SwapInAverages(), StepOnce(engine.get(), net.get()),
        engine->SaveCheckpoint("/nowhere"),
        engine->SetMaster("a", torch::zeros({1})),
        engine->SetOptimizerState("a", "ema", torch::zeros({1})),
        engine->LoadSafetensors("/nowhere").status()}) {
    absl::StrAppend(&record, status.ToString(), "\n");
  }
  TESSERA_RETURN_IF_ERROR(engine->SwapOutAverages());
  TESSERA_RETURN_IF_ERROR(say("out"));
  absl::StrAppend(&record, engine->SwapOutAverages().ToString(), "\n");
  TESSERA_RETURN_IF_ERROR(StepOnce(engine.get(), net.get()));
  TESSERA_RETURN_IF_ERROR(say("step"));
  return record;
}

// Parameter a is 0.5, 0, -0.5, -1. Its average begins with 0.5, and then goes a
// quarter of the way each time.
TEST(AveragesTest, AreSwappedInAndOut) {
  for (const char* stage : {"1", "3"}) {
    EXPECT_THAT(
        RunOnRanks(2, "Averages", stage),
        Each(
            AllOf(HasSubstr("step: 0.5 0.5\nstep: 0 0.375\nstep: -0.5 0.15625\n"
                            "in: 0.15625 -0.5\n"),
                  HasSubstr("the parameters are their averages; call "
                            "Engine::SwapOutAverages first"),
                  Not(HasSubstr("NOT_FOUND")), HasSubstr("out: -0.5 0.15625\n"),
                  HasSubstr("the parameters are not their averages"),
                  HasSubstr("step: -1 -0.132812\n"))));
  }
}

// args: a proto::Optimizer. Names of parameters whose average is not their
// value after the first step, of those that have been stepped.
TESSERA_RANK_FUNCTION(FirstAverages) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.optimizer = std::string(args);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel("Mlp", world.rank()), ConfigOf(spec),
                               world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  std::string others;
  for (const auto& p : t.model->named_parameters()) {
    if (absl::StartsWith(p.key(), "unused.")) continue;
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                             t.engine->Master(p.key()));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor ema,
                             t.engine->OptimizerStateOf(p.key(), "ema"));
    if (!ema.equal(master)) absl::StrAppend(&others, p.key(), " ");
  }
  return others;
}

TEST(AveragesTest, BeginAsTheFirstStepsValues) {
  for (const char* type : {"AdamW", "Lamb", "Muon"}) {
    EXPECT_THAT(
        RunOnRanks(2, "FirstAverages",
                   absl::StrCat("type:'", type, "',params{ema_decay:0.75}")),
        Each(""))
        << type;
  }
}

// Whether a module's parameters are trainable, as engines have found them.
TESSERA_RANK_FUNCTION(FreezeAndClose) {
  auto net = std::make_shared<Net>();
  std::string record;
  const auto note = [&] {
    absl::StrAppend(&record, net->norm->weight.requires_grad() ? "t" : "f");
  };
  const proto::Config config = SgdConfig(/*accumulation=*/2);
  ParameterGroup norms;
  norms.name = "norms";
  norms.modules = {"LayerNorm"};
  norms.frozen = true;
  ParameterGroup differs = norms;
  differs.options = {{"lr", 0.1 + 1e-9 * world.rank()}};
  const absl::Status refused = EngineOf(net, config, {differs}, world).status();
  note();
  differs = norms;
  differs.frozen = world.rank() == 0;
  const absl::Status other = EngineOf(net, config, {differs}, world).status();
  note();
  TESSERA_ASSIGN_OR_RETURN(auto engine, EngineOf(net, config, {norms}, world));
  note();
  TESSERA_RETURN_IF_ERROR(StepOnce(engine.get(), net.get()));
  const absl::Status within = engine->SetFrozen("norms", false);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  note();
  return absl::StrCat(
      record, " ",
      absl::StrJoin({refused, other, within}, " ",
                    [](std::string* out, const absl::Status& status) {
                      absl::StrAppend(out, status.ToString());
                    }));
}

TEST(ParameterGroupsTest, AreThawedWithTheirEngine) {
  EXPECT_THAT(
      RunOnRanks(2, "FreezeAndClose", ""),
      Each(::testing::ContainsRegex(
          "^ttft INVALID.*list of parameter groups differs.* INVALID.*list of "
          "parameter groups differs.* FAILED_PRECONDITION.*in the middle of a "
          "step")));
}

// args: a folder. Options that the program has set, after a load elsewhere.
TESSERA_RANK_FUNCTION(SaveOptions) {
  proto::Config config = SgdConfig();
  proto::ParamGroup* const group =
      config.mutable_optimizer()->add_param_groups();
  group->set_name("second");
  group->add_parameters("b");
  const auto make = [&] {
    return EngineOf(std::make_shared<Net>(), config, {}, world);
  };
  TESSERA_ASSIGN_OR_RETURN(auto engine, make());
  TESSERA_RETURN_IF_ERROR(engine->SetOption("second", "weight_decay", 0.125));
  TESSERA_RETURN_IF_ERROR(engine->SetLearningRate(0.0625));
  const std::string folder(args);
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(folder));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  TESSERA_ASSIGN_OR_RETURN(engine, make());
  TESSERA_RETURN_IF_ERROR(engine->SetOption("default", "weight_decay", 3));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(folder).status());
  std::string record;
  for (const char* name : {"default", "second"}) {
    for (const char* option : {"lr", "weight_decay"}) {
      TESSERA_ASSIGN_OR_RETURN(const double value,
                               engine->OptionOf(name, option));
      absl::StrAppend(&record, value, " ");
    }
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  // A scheduler's rates begin with the configuration's.
  proto::Config scheduled = config;
  scheduled.mutable_scheduler()->set_type("StepLR");
  scheduled.mutable_scheduler()->mutable_params()->set_step_size(1);
  TESSERA_ASSIGN_OR_RETURN(
      engine, EngineOf(std::make_shared<Net>(), scheduled, {}, world));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(folder).status());
  for (const char* option : {"lr", "weight_decay"}) {
    TESSERA_ASSIGN_OR_RETURN(const double value,
                             engine->OptionOf("second", option));
    absl::StrAppend(&record, value, " ");
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  // There is no such group.
  config.mutable_optimizer()->clear_param_groups();
  TESSERA_ASSIGN_OR_RETURN(engine, make());
  return absl::StrCat(record,
                      engine->LoadCheckpoint(folder).status().ToString());
}

TEST(ParameterGroupsTest, AreKeptInCheckpoints) {
  const TempFolder folder;
  EXPECT_THAT(RunOnRanks(2, "SaveOptions", folder.path() + "/saved"),
              Each(AllOf(HasSubstr("0.0625 0 0.0625 0.125 0.5 0.125 "),
                         HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("of the parameter group 'second', and this "
                                   "run has no such group"))));
}

// Returns the errors, one on each line.
TESSERA_RANK_FUNCTION(WrongGroups) {
  std::string record;
  const auto say = [&](const absl::Status& status) {
    absl::StrAppend(&record, status.ToString(), "\n");
  };
  const auto create = [&](const std::vector<ParameterGroup>& groups) {
    say(EngineOf(std::make_shared<Net>(), SgdConfig(), groups, world).status());
  };
  ParameterGroup a;
  a.name = "a";
  a.parameters = {"norm.wieght"};
  create({a});
  a.parameters = {"norm.*"};
  ParameterGroup b = a;
  b.name = "b";
  b.parameters.clear();
  b.modules = {"LayerNorm"};
  create({a, b});
  b.modules = {"LayerNrm"};
  create({b});
  a.options = {{"beta1", 0.5}};
  create({a});
  a.options = {{"momentum", 0.9}};
  create({a});
  a.options = {{"lr", std::nan("")}};
  create({a});
  a.options = {{"lr", 0.1 * (1 + world.rank())}};
  create({a});
  a.options.clear();
  a.parameters.clear();
  a.claims = [](const auto&, absl::string_view, const at::Tensor&) {
    return false;
  };
  create({a});
  TESSERA_ASSIGN_OR_RETURN(const auto engine, EngineOf(std::make_shared<Net>(),
                                                       SgdConfig(), {}, world));
  say(engine->SetOption("defualt", "lr", 0.1));
  say(engine->SetOption("default", "learning_rate", 0.1));
  say(engine->SetOption("default", "weight_decay", 0.1 * world.rank()));
  say(engine->SetOption("default", "lr", -1));
  say(engine->OptimizerStateOf("a", "exp_avg").status());
  return record;
}

TEST(ParameterGroupsTest, WhatIsWrongIsSaid) {
  const std::vector<std::string> answers = RunOnRanks(2, "WrongGroups", "");
  const std::vector<std::string> lines = absl::StrSplit(answers[0], '\n');
  EXPECT_THAT(
      lines,
      ElementsAre(
          HasSubstr("EngineOptions::param_groups[0].parameters: 'norm.wieght' "
                    "is not a parameter; expected names as of "
                    "named_parameters(), such as 'norm.weight'"),
          HasSubstr("parameter 'norm.weight' is claimed by two groups, 'a' and "
                    "'b'"),
          HasSubstr("no module is of class 'LayerNrm'; expected one of these, "
                    "nearest first: torch::nn::LayerNormImpl"),
          HasSubstr("option 'beta1': SGD has no such; it has lr"),
          HasSubstr("option 'momentum': with 0.9 SGD keeps other states"),
          HasSubstr("option 'lr': expected a finite number of at least 0, got "
                    "nan"),
          AllOf(HasSubstr("list of parameter groups differs"),
                HasSubstr(" lr 0.")),
          HasSubstr("the group 'a' has no parameters"),
          HasSubstr("no parameter group 'defualt'; there is 'default'; did you "
                    "mean 'default'?"),
          HasSubstr("option 'learning_rate': SGD has no such"),
          HasSubstr("option of SetOption differs"),
          HasSubstr("option 'lr': expected a finite number of at least 0, got "
                    "-1"),
          HasSubstr("NOT_FOUND"), ""));
}

}  // namespace
}  // namespace tessera
