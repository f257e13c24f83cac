// What a user does wrong with an engine that is there: an error on every rank
// that names the parameter and says what to do, without a hang; and where all
// ranks did the same, training goes on as if nothing had been.
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kSomeParameter[] = "blocks.1.up.weight";

// Each gives the error that it meets, and leaves all as it was.
using Misuse = std::function<absl::Status(Trainee&)>;

absl::Status WithWeight(Trainee& t, double weight) {
  return t.Backward(9, BackwardOptions{weight});
}

absl::Status RegisteredAfterCreate(Trainee& t) {
  t.model->register_module("late", torch::nn::Linear(3, 3));
  TESSERA_RETURN_IF_ERROR(t.Backward(9));
  const absl::Status status = t.engine->Step();
  t.model->unregister_module("late");
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  return status;
}

// A parameter that takes another's place, name and all.
absl::Status ReplacedAfterCreate(Trainee& t) {
  auto children = t.model->named_children();
  torch::nn::Linear other(7, 5);
  t.model->replace_module("unused", other);
  TESSERA_RETURN_IF_ERROR(t.Backward(9));
  const absl::Status status = t.engine->Step();
  t.model->replace_module("unused", children["unused"]);
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  return status;
}

absl::Status NoDataAnywhere(Trainee& t) {
  TESSERA_RETURN_IF_ERROR(WithWeight(t, 0));
  const absl::Status status = t.engine->Step();
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  return status;
}

// What a hook meets that calls the engine in the middle of a Backward.
absl::Status InBackward(
    Trainee& t,
    const std::function<absl::Status(Trainee& t, const at::Tensor& loss)>& f) {
  absl::Status met;
  const at::Tensor loss = t.Loss(9);
  loss.register_hook([&](const at::Tensor&) { met = f(t, loss); });
  TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  return met;
}

const std::map<std::string, Misuse>& Misuses() {
  static const auto* all = new std::map<std::string, Misuse>{
      {"to",
       [](Trainee& t) {
         return CatchTorch("to", [&] { t.model->to(torch::kDouble); });
       }},
      {"set_data",
       [](Trainee& t) {
         const at::Tensor p = t.parameter(kSomeParameter);
         return CatchTorch("set_data", [&] {
           p.set_data(torch::zeros({3, 4}));
         });
       }},
      {"registered", RegisteredAfterCreate},
      {"replaced", ReplacedAfterCreate},
      {"negative_weight", [](Trainee& t) { return WithWeight(t, -1); }},
      {"nan_weight", [](Trainee& t) { return WithWeight(t, std::nan("")); }},
      {"infinite_weight", [](Trainee& t) { return WithWeight(t, HUGE_VAL); }},
      {"nan_weight_of_rank_1",
       [](Trainee& t) {
         return WithWeight(t, t.rank == 1 ? std::nan("") : 2);
       }},
      {"no_data", NoDataAnywhere},
      {"zero_grad_in_backward",
       [](Trainee& t) {
         return InBackward(t, [](Trainee& trainee, const at::Tensor&) {
           return trainee.engine->ZeroGrad();
         });
       }},
      {"step_in_backward",
       [](Trainee& t) {
         return InBackward(t, [](Trainee& trainee, const at::Tensor&) {
           return trainee.engine->Step();
         });
       }},
      {"backward_in_backward",
       [](Trainee& t) {
         return InBackward(t, [](Trainee& trainee, const at::Tensor& loss) {
           return trainee.engine->Backward(loss);
         });
       }},
      {"raw_pointer",
       [](Trainee& t) {
         const at::Tensor p = t.parameter(kSomeParameter);
         return CatchTorch("read", [&] { return p.const_data_ptr(); }).status();
       }},
      {"save",
       [](Trainee& t) {
         std::ostringstream out;
         return CatchTorch("save", [&] {
           torch::save(std::shared_ptr<torch::nn::Module>(t.model), out);
         });
       }},
  };
  return *all;
}

// args: "<name> <spec>". The error, and in further lines the parameters after a
// step before it and one after it.
TESSERA_RANK_FUNCTION(TryMisuse) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(words.at(1)), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const absl::Status status = Misuses().at(words.at(0))(t);
  const absl::Status next = t.TrainStep(1);
  if (!next.ok()) return absl::StrCat(status.ToString(), "\n", next.ToString());
  TESSERA_ASSIGN_OR_RETURN(std::string parameters, t.Finish());
  return absl::StrCat(status.ToString(), "\n", parameters);
}

class MisuseTest : public ::testing::TestWithParam<int> {
 protected:
  MisuseTest() { spec_.stage = GetParam(); }
  template <typename Matcher>
  void ExpectRefused(const std::string& name, const Matcher& matcher) {
    SCOPED_TRACE(name);
    std::vector<std::string> answers =
        RunOnRanks(2, "TryMisuse", absl::StrCat(name, " ", spec_.ToText()));
    EXPECT_THAT(TakeFirstLines(&answers), Each(matcher));
    ExpectParameters(answers, spec_, 2, {LossOf(0), LossOf(1)});
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, MisuseTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST_P(MisuseTest, AnotherDtypeOrShapeIsRefusedByName) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    ExpectRefused("to", AllOf(HasSubstr("INVALID_ARGUMENT"),
                              HasSubstr("parameter 'in.weight'"),
                              HasSubstr("before Engine::Create")));
    ExpectRefused("set_data", AllOf(HasSubstr("INVALID_ARGUMENT"),
                                    HasSubstr("parameter 'blocks.1.up.weight'"),
                                    HasSubstr("[3, 4]"),
                                    HasSubstr("before Engine::Create")));
  }
}

TEST_P(MisuseTest, AParameterThatIsNewIsNamedAtStep) {
  ExpectRefused("registered",
                AllOf(HasSubstr("FAILED_PRECONDITION"),
                      HasSubstr("parameter 'late.weight' was registered after "
                                "Engine::Create"),
                      HasSubstr("Close() the engine and Create another")));
  ExpectRefused("replaced",
                AllOf(HasSubstr("FAILED_PRECONDITION"),
                      HasSubstr("parameter 'unused.weight' was registered "
                                "after Engine::Create"),
                      HasSubstr("Close() the engine and Create another")));
}

TEST_P(MisuseTest, WeightsThatAreNoNumbersOfSamplesAreRefused) {
  ExpectRefused("negative_weight",
                AllOf(HasSubstr("INVALID_ARGUMENT"),
                      HasSubstr("finite weight of at least 0, got -1")));
  ExpectRefused("nan_weight",
                HasSubstr("finite weight of at least 0, got nan"));
  ExpectRefused("infinite_weight",
                HasSubstr("finite weight of at least 0, got inf"));
  if (GetParam() == 3) return;  // rank 0 is then inside of its backward
  ExpectRefused("nan_weight_of_rank_1",
                HasSubstr("finite weight of at least 0, got nan"));
}

TEST_P(MisuseTest, AStepWithoutAnyDataIsRefused) {
  ExpectRefused("no_data", AllOf(HasSubstr("FAILED_PRECONDITION"),
                                 HasSubstr("no rank had data"),
                                 HasSubstr("AnyRankHasData")));
}

TEST_P(MisuseTest, CallsWithinABackwardAreRefused) {
  for (const char* call : {"zero_grad", "step", "backward"}) {
    ExpectRefused(absl::StrCat(call, "_in_backward"),
                  AllOf(HasSubstr("FAILED_PRECONDITION"),
                        HasSubstr("within an Engine::Backward")));
  }
}

TEST_P(MisuseTest, ARawPointerToAFreedParameterNamesIt) {
  if (GetParam() < 3) return;  // whole
  spec_.shared = "off";
  const auto named = AllOf(HasSubstr("is sharded and freed between uses"),
                           HasSubstr("tessera::Use(w)"));
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (int64_t max_live : {0, 1000000}) {
      spec_.max_live_parameters = max_live;
      ExpectRefused("raw_pointer",
                    AllOf(named, HasSubstr("'blocks.1.up.weight'")));
      ExpectRefused("save", AllOf(named, HasSubstr("'in.weight'")));
    }
  }
}

// ---- what leaves the ranks apart

// Rank 1 alone has another parameter, and ends with its error; rank 0 finds out
// in Step or in the next Backward.
TESSERA_RANK_FUNCTION(RegisteredOnRank1) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  if (t.rank == 1) t.model->register_module("late", torch::nn::Linear(3, 3));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  return CatchTorch("forward and backward", [&] { return t.Backward(1); })
      .ToString();
}

TEST_P(MisuseTest, AParameterThatIsNewOnOneRankEndsAll) {
  const std::vector<std::string> errors =
      RunOnRanks(2, "RegisteredOnRank1", spec_.ToText(), absl::Seconds(15));
  EXPECT_THAT(errors, Each(HasSubstr("parameter 'late.weight'")));
  EXPECT_THAT(errors[0], HasSubstr("rank 1"));
}

// After a write that is the same on all ranks, one of rank 1 alone where rank 0
// reads. args: the spec; before it "normal " for values that differ.
TESSERA_RANK_FUNCTION(WriteOnRank1) {
  const bool normal = absl::ConsumePrefix(&args, "normal ");
  const TrainingSpec spec = TrainingSpec::FromText(args);
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->set_check_writes(true);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  torch::NoGradGuard no_grad;
  t.parameter("out.weight").mul_(2);
  torch::AutoGradMode enable_grad(true);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  torch::AutoGradMode again(false);
  const at::Tensor p = t.parameter(kSomeParameter);
  if (normal) {
    torch::nn::init::normal_(p);  // generators differ between ranks
  } else if (t.rank == 1) {
    p[2][3] = 0.5;
  } else {
    p[2][3].item<float>();
  }
  torch::AutoGradMode enable_again(true);
  TESSERA_RETURN_IF_ERROR(t.Backward(1));
  return t.engine->Step().ToString();
}

TEST_P(MisuseTest, AWriteOfOneRankIsNamedAtStep) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    for (const char* how : {"", "normal "}) {
      EXPECT_THAT(
          RunOnRanks(2, "WriteOnRank1", absl::StrCat(how, spec_.ToText())),
          Each(AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("[blocks.1]"),
                     HasSubstr("rank 1"),
                     HasSubstr("make the same writes on all ranks"))));
    }
  }
}

// ---- autocast

// Two losses of one forward; then a forward without a scope.
TESSERA_RANK_FUNCTION(ForwardOutsideOfAutocast) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  proto::Config config = ConfigOf(spec);
  config.mutable_torch_autocast()->set_enabled(true);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  at::Tensor first, second;
  {
    Engine::AutocastScope scope(t.engine.get());
    first = t.Loss(0);
    second = t.Loss(1);
  }
  const absl::Status one = t.engine->Backward(first);
  const absl::Status two = t.engine->Backward(second);
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  const absl::Status outside = t.Backward(2);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(one.ToString(), ", ", two.ToString(), ", ",
                      outside.ToString());
}

TEST_P(MisuseTest, AForwardOutsideOfAutocastIsNoticed) {
  EXPECT_THAT(
      RunOnRanks(2, "ForwardOutsideOfAutocast", spec_.ToText()),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("torch_autocast"),
                 HasSubstr("Engine::AutocastScope"))));
}

// ---- an engine that is gone

TESSERA_RANK_FUNCTION(DestroyedWithoutClose) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  t.engine.reset();
  const at::Tensor p = t.parameter(kSomeParameter);
  return CatchTorch("sum", [&] { return p.sum(); }).status().ToString();
}

TEST_P(MisuseTest, AnEngineDestroyedWithoutCloseIsNamed) {
  EXPECT_THAT(RunOnRanks(2, "DestroyedWithoutClose", spec_.ToText()),
              Each(AllOf(HasSubstr("'blocks.1.up.weight'"),
                         HasSubstr("was destroyed without Close()"))));
}

}  // namespace
}  // namespace tessera
