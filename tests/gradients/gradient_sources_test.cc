// Gradients that come by other ways than the engine's own Backward: a bare
// loss.backward(), another engine's Backward, hooks of the user's. How they are
// dropped is in zero_grad_test.cc.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "verify/oracle.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kSomeParameter[] = "blocks.1.up.weight";

class GradientSourcesTest : public ::testing::TestWithParam<int> {
 protected:
  GradientSourcesTest() { spec_.stage = GetParam(); }
  std::vector<std::string> Run(absl::string_view function,
                               absl::string_view before = "") {
    return RunOnRanks(2, function, absl::StrCat(before, spec_.ToText()));
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, GradientSourcesTest,
                         ::testing::Values(0, 1, 2, 3), [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// ---- bare backwards

// Adds what a bare backward before it left.
absl::Status StepWithOutside(Trainee& t, int64_t micro_batch) {
  BackwardOptions options;
  options.add_outside = true;
  TESSERA_RETURN_IF_ERROR(t.Backward(micro_batch, options));
  return t.engine->Step();
}

TESSERA_RANK_FUNCTION(BareBackward) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  t.Loss(5).backward();
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, t.engine->Step()));
  TESSERA_RETURN_IF_ERROR(StepWithOutside(t, 0));
  // This one's are dropped.
  t.Loss(6).backward();
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  if (t.parameter(kSomeParameter).grad().defined()) {
    return absl::InternalError(".grad is left");
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  // By now the engine knows which parameters to expect.
  t.Loss(7).backward();
  TESSERA_RETURN_IF_ERROR(StepWithOutside(t, 2));
  return t.Finish();
}

TEST_P(GradientSourcesTest, ABareBackwardIsAddedByAnOwnOneThatIsAskedTo) {
  auto with_bare = [](int64_t bare, int64_t own) {
    return [=](torch::nn::Module& module, int rank, int64_t) {
      OwnLoss()(module, rank, bare).backward();
      return OwnLoss()(module, rank, own);
    };
  };
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    ExpectParameters(Run("BareBackward"), spec_, 2,
                     {with_bare(5, 0), LossOf(1), with_bare(7, 2)});
  }
}

TESSERA_RANK_FUNCTION(BareBackwardOnRank1) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  at::Tensor loss = t.Loss(5);
  if (t.rank == 1) loss.backward();
  TESSERA_RETURN_IF_ERROR(StepWithOutside(t, 0));
  return t.Finish();
}

TEST_P(GradientSourcesTest, ABareBackwardOfOneRankIsReducedToo) {
  if (GetParam() == 3) return;  // there a backward gathers: all ranks make it
  ExpectParameters(Run("BareBackwardOnRank1"), spec_, 2,
                   {[](torch::nn::Module& module, int rank, int64_t) {
                     if (rank == 1) OwnLoss()(module, rank, 5).backward();
                     return OwnLoss()(module, rank, 0);
                   }});
}

// ---- engines that never step

// args: "what stage". A loop, and how the engine ends.
TESSERA_RANK_FUNCTION(NeverSteps) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const std::string& what = words[0];
  TrainingSpec spec;
  TESSERA_CHECK(absl::SimpleAtoi(words[1], &spec.stage));
  proto::Config config = ConfigOf(spec);
  if (what == "looks") config.clear_optimizer();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  torch::optim::SGD sgd(t.model->parameters(), 0.01);
  for (int step = 0; step < 2; ++step) {
    if (what == "evaluates") {
      torch::NoGradGuard no_grad;
      t.Loss(step);
    } else if (what == "old") {
      t.Loss(step).backward();
      sgd.step();
      sgd.zero_grad();
    } else if (what != "nothing") {
      TESSERA_RETURN_IF_ERROR(t.Backward(step));
      if (what == "steps") TESSERA_RETURN_IF_ERROR(t.engine->Step());
      if (what == "backward") TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
    }
  }
  if (spec.stage < 2) TESSERA_RETURN_IF_ERROR(t.engine->Close());
  t.engine.reset();
  return what;
}

TEST(NeverStepsTest, IsSaidWhereGradientsWereMade) {
  const auto said = [](const std::string& args) {
    EXPECT_THAT(RunOnRanks(2, "NeverSteps", args),
                Each(args.substr(0, args.find(' '))));
    EXPECT_EQ(RankPool::Get(2)->stderr_of(1), "");
    return RankPool::Get(2)->stderr_of(0);
  };
  for (const std::string stage : {" 1", " 3"}) {
    EXPECT_THAT(said("old" + stage),
                AllOf(HasSubstr("this engine has never stepped"),
                      HasSubstr("a bare loss.backward()"),
                      HasSubstr("engine->Backward(loss)")));
    EXPECT_THAT(said("backward" + stage),
                AllOf(HasSubstr("this engine has never stepped"),
                      HasSubstr("Engine::Backward was called, and "
                                "Engine::Step never")));
    for (const char* what : {"steps", "nothing", "evaluates", "looks"}) {
      EXPECT_EQ(said(what + stage), "");
    }
  }
}

// ---- two engines

// Two networks, each a module with an engine of its own, against each other.
class Gan {
 public:
  static at::Tensor Noise(int rank, int64_t n) {
    return torch::randn({5, 4}, at::detail::createCPUGenerator(
                                    static_cast<uint64_t>(100 * n + rank)));
  }
  static std::shared_ptr<torch::nn::Module> Net(int64_t in, int64_t out) {
    auto net = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Linear(in, 9), torch::nn::Tanh(), torch::nn::Linear(9, out));
    return net;
  }
  static std::shared_ptr<torch::nn::Module> MakeGenerator() {
    return Net(4, 6);
  }
  static std::shared_ptr<torch::nn::Module> MakeCritic() { return Net(6, 1); }

  static at::Tensor CriticLoss(torch::nn::Module& generator,
                               torch::nn::Module& critic, int rank,
                               int64_t step) {
    at::Tensor fake = Of(generator, Noise(rank, 3 * step)).detach();
    at::Tensor real = Noise(rank, 3 * step + 1).repeat({1, 2}).narrow(1, 0, 6);
    return Of(critic, fake).sigmoid().mean() -
           Of(critic, real).sigmoid().mean();
  }
  static at::Tensor GeneratorLoss(torch::nn::Module& generator,
                                  torch::nn::Module& critic, int rank,
                                  int64_t step) {
    return -Of(critic, Of(generator, Noise(rank, 3 * step + 2)))
                .sigmoid()
                .mean();
  }

 private:
  static at::Tensor Of(torch::nn::Module& net, const at::Tensor& x) {
    return net.as<torch::nn::SequentialImpl>()
        ->forward(x.to(net.parameters()[0].dtype()))
        .to(torch::kFloat);
  }
};

// args: the spec; before it "zero " if the critic's gradients are zeroed before
// its turn.
TESSERA_RANK_FUNCTION(TwoEngines) {
  const bool zero_grad = absl::ConsumePrefix(&args, "zero ");
  const TrainingSpec spec = TrainingSpec::FromText(args);
  at::set_num_threads(1);
  torch::manual_seed(3);
  auto generator = Gan::MakeGenerator();
  torch::manual_seed(3);
  auto critic = Gan::MakeCritic();
  const auto& comm = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(auto g, MakeEngine(generator, spec, comm));
  TESSERA_ASSIGN_OR_RETURN(auto c, MakeEngine(critic, spec, comm));
  const int r = world.rank();
  for (int i = 0; i < 3 * spec.accumulation; ++i) {
    if (zero_grad) critic->zero_grad();
    BackwardOptions options;
    options.add_outside = !zero_grad;
    TESSERA_RETURN_IF_ERROR(
        c->Backward(Gan::CriticLoss(*generator, *critic, r, i), options));
    TESSERA_RETURN_IF_ERROR(c->Step());
    TESSERA_RETURN_IF_ERROR(
        g->Backward(Gan::GeneratorLoss(*generator, *critic, r, i)));
    TESSERA_RETURN_IF_ERROR(g->Step());
  }
  TESSERA_ASSIGN_OR_RETURN(Record parameters, ParametersOf(*g, *generator));
  TESSERA_ASSIGN_OR_RETURN(Record more, ParametersOf(*c, *critic));
  parameters.insert(parameters.end(), more.begin(), more.end());
  TESSERA_RETURN_IF_ERROR(g->Close());
  TESSERA_RETURN_IF_ERROR(c->Close());
  return ToText(parameters);
}

Record TwoOracles(const TrainingSpec& spec, bool zero_grad) {
  OracleOptions options = OracleOptionsOf(spec, 2);
  options.model_seed = 3;
  Oracle g(Gan::MakeGenerator, options), c(Gan::MakeCritic, options);
  for (int step = 0; step < 3; ++step) {
    c.TrainStep([&](torch::nn::Module& critic, int rank, int64_t) {
      if (zero_grad) critic.zero_grad();
      return Gan::CriticLoss(g.module(rank), critic, rank, step);
    });
    g.TrainStep([&](torch::nn::Module& generator, int rank, int64_t) {
      return Gan::GeneratorLoss(generator, c.module(rank), rank, step);
    });
  }
  Record parameters = ParametersOf(g);
  for (std::string& line : ParametersOf(c)) parameters.push_back(line);
  return parameters;
}

TEST_P(GradientSourcesTest, AnEngineReducesInItsOwnBackwardOnly) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (int64_t max_live : {0, 1000000}) {
      spec_.max_live_parameters = max_live;
      for (bool zero_grad : {false, true}) {
        SCOPED_TRACE(absl::StrCat(spec_.ToText(), zero_grad ? " zero" : ""));
        const Record expected = TwoOracles(spec_, zero_grad);
        for (const std::string& answer :
             Run("TwoEngines", zero_grad ? "zero " : "")) {
          EXPECT_EQ(FirstDifference(expected, RecordFromText(answer)), "");
        }
      }
    }
  }
}

// ---- hooks

// Keeps what the gradient is, each time.
class KeepingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit KeepingHook(std::vector<std::string>* kept) : kept_(kept) {}
  void operator()(const at::Tensor& tensor) override {
    kept_->push_back(PrintOf(tensor.grad()));
  }

 private:
  std::vector<std::string>* kept_;
};

void SetHook(const at::Tensor& tensor, std::vector<std::string>* kept) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      tensor, std::make_unique<KeepingHook>(kept));
}

// Compares what hooks of both kinds see of a parameter with a plain model's.
TESSERA_RANK_FUNCTION(HooksBeforeCreate) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  const int r = world.rank();
  std::vector<std::string> seen, accumulated, plain;
  auto model = BuildModel("Mlp", r), twin = BuildModel("Mlp", r);
  if (spec.dtype == "bf16") twin->to(torch::kBFloat16);
  SetHook(twin->named_parameters()[kSomeParameter], &plain);
  const at::Tensor parameter = model->named_parameters()[kSomeParameter];
  parameter.register_hook(
      [&](const at::Tensor& gradient) { seen.push_back(PrintOf(gradient)); });
  SetHook(parameter, &accumulated);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  for (int i = 0; i < 2; ++i) {
    BackwardOptions options;
    options.more_losses = true;
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(r, i), options));
    twin->zero_grad();
    const at::Tensor loss = twin->Loss(r, i);
    loss.backward(torch::full_like(loss, 1.0 / spec.accumulation));
  }
  if (plain.size() != 2 || plain[0] == plain[1]) {
    return absl::InternalError("the twin's hook was not called");
  }
  if (seen != plain) return absl::InternalError("seen by register_hook");
  if (accumulated != plain) {
    return absl::InternalError("seen by the post-accumulate hook");
  }
  // They are given back.
  TESSERA_RETURN_IF_ERROR(engine->Close());
  model->Loss(r, 0).backward();
  return absl::StrCat(seen.size(), " ", accumulated.size(), " ",
                      parameter.grad().defined());
}

TEST_P(GradientSourcesTest, HooksFoundAtCreateSeeThisRanksGradients) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    spec_.accumulation = 2;
    EXPECT_THAT(Run("HooksBeforeCreate"), Each("3 3 1"));
  }
}

std::shared_ptr<TestModel> MakeHooked() {
  auto model = MakeTestModel("Mlp");
  const at::Tensor parameter = model->named_parameters()[kSomeParameter];
  parameter.register_hook([](const at::Tensor& gradient) {
    return at::clamp(gradient * 3, -0.01, 0.01);
  });
  return model;
}

TESSERA_RANK_FUNCTION(TrainHooked) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  at::set_num_threads(1);
  torch::manual_seed(TrainingSpec::kModelSeed);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(MakeHooked(), ConfigOf(spec), world.communicator()));
  for (int step = 0; step < spec.steps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TEST_P(GradientSourcesTest, WhatAHookMakesOfAGradientIsReduced) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    Oracle oracle(MakeHooked, OracleOptionsOf(spec_, 2));
    for (int step = 0; step < spec_.steps; ++step) oracle.TrainStep(OwnLoss());
    ExpectParameters(Run("TrainHooked"), oracle);
  }
}

TESSERA_RANK_FUNCTION(HookAfterCreate) {
  std::vector<std::string> kept;
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  if (t.rank == 1) SetHook(t.parameter(kSomeParameter), &kept);
  const absl::Status status = t.Backward(0);
  t.engine.reset();  // the model is of no use any more
  return status.ToString();
}

TEST_P(GradientSourcesTest, AHookSetAfterCreateIsAnErrorThatNamesIt) {
  const std::vector<std::string> answers = Run("HookAfterCreate");
  EXPECT_THAT(answers, Each(AllOf(HasSubstr(kSomeParameter), HasSubstr("hook"),
                                  HasSubstr("set hooks before Create"))));
  EXPECT_THAT(answers[0], HasSubstr("rank 1"));
}

}  // namespace
}  // namespace tessera
