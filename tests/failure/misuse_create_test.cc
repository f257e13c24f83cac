// What Engine::Create does not take, or takes and warns of later: an error on
// every rank that names the parameter, the class or the pattern and says what
// to do, and the module is what it was.
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/models/models.h"
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

at::Tensor Some(const torch::nn::Module& module) {
  return module.named_parameters()[kSomeParameter];
}

// Each changes the module or the configuration, on this rank.
struct Attempt {
  int rank;
  std::shared_ptr<TestModel> model;
  proto::Config config;
  EngineOptions options;
};
using Change = std::function<void(Attempt&)>;

at::Tensor OnMeta() { return torch::empty({3}, torch::kMeta); }

// The last parameter of all.
void AddApart(Attempt& a, const at::Tensor& tensor) {
  auto late = std::make_shared<torch::nn::Module>();
  late->register_parameter("apart", tensor);
  a.model->register_module("late", late);
}

// Built where nothing has memory.
struct MetaModel : TestModel {
  MetaModel() { register_parameter("weightless", OnMeta()); }
  at::Tensor Loss(int, int64_t) override { return {}; }
};

const std::map<std::string, Change>& Changes() {
  static const auto* all = new std::map<std::string, Change>{
      {"one_on_meta", [](Attempt& a) { AddApart(a, OnMeta()); }},
      {"one_on_meta_of_rank_1",
       [](Attempt& a) {
         AddApart(a, a.rank == 1 ? OnMeta() : torch::ones({3}));
       }},
      {"all_on_meta",
       [](Attempt& a) { a.model = std::make_shared<MetaModel>(); }},
      {"shape_of_rank_1",
       [](Attempt& a) {
         const at::Tensor p = Some(*a.model);
         if (a.rank == 1) p.set_data(p.t().contiguous());
       }},
      {"shape_of_rank_1_that_is_to_follow_rank_0",
       [](Attempt& a) {
         a.options.sync_from_rank0 = true;
         if (a.rank == 1) Some(*a.model).set_data(torch::ones({3, 4}));
       }},
      {"dtype_of_rank_1",
       [](Attempt& a) {
         const at::Tensor p = Some(*a.model);
         if (a.rank == 1) p.set_data(p.to(torch::kDouble));
       }},
      // As many parameters, of the same shapes, in another order.
      {"order_of_rank_1",
       [](Attempt& a) {
         for (const char* name : {"x", "y"}) {
           const std::string own =
               a.rank == 1 ? (*name == 'x' ? "y" : "x") : name;
           a.model->register_parameter(own, torch::ones({3}));
         }
       }},
      {"unit_class",
       [](Attempt& a) {
         a.config.mutable_sharding()->add_unit_classes("MlpBlok");
       }},
      {"leaf_class",
       [](Attempt& a) {
         a.config.mutable_zero_optimization()
             ->mutable_leaf_module()
             ->add_classes("Expert");
       }},
      {"fp32_class",
       [](Attempt& a) {
         a.config.mutable_precision()->add_fp32_classes("RmsNorm");
       }},
      {"ignored",
       [](Attempt& a) {
         a.config.mutable_sharding()->add_ignored_parameters("blocks.7*");
       }},
      {"throwing_predicate_of_rank_1",
       [](Attempt& a) {
         a.options.is_unit = [rank = a.rank](const torch::nn::Module&,
                                             absl::string_view) {
           if (rank == 1) throw std::out_of_range("no such layer");
           return false;
         };
       }},
      {"no_memory",
       [](Attempt& a) {
         a.config.mutable_zero_optimization()->set_auto_stage(true);
         a.config.mutable_sharding()->set_memory_limit_bytes(1000);
       }},
  };
  return *all;
}

// args: the change's name. The error; then a plain backward of what is left.
TESSERA_RANK_FUNCTION(TryCreate) {
  Attempt a;
  a.rank = world.rank();
  a.model = BuildModel("Mlp", a.rank);
  a.config = ConfigOf(TrainingSpec());
  Changes().at(std::string(args))(a);
  std::vector<std::string> before;
  for (const at::Tensor& p : a.model->parameters()) {
    before.push_back(p.is_meta() ? "meta" : PrintOf(p));
  }
  a.options.communicator = world.communicator();
  auto engine = Engine::Create(a.model, a.config, a.options);
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("afterwards"));
  for (size_t i = 0; i < before.size(); ++i) {
    const at::Tensor p = a.model->parameters()[i];
    if (before[i] == (p.is_meta() ? "meta" : PrintOf(p))) continue;
    return absl::InternalError(absl::StrCat("parameter ", i, " has changed"));
  }
  return engine.status().ToString();
}

template <typename Matcher>
void ExpectRefused(const std::string& change, const Matcher& matcher) {
  SCOPED_TRACE(change);
  EXPECT_THAT(RunOnRanks(2, "TryCreate", change), Each(matcher));
}

// The other rank would wait for it in the agreement that follows.
TEST(MisuseCreateTest, APredicateThatThrowsOnOneRankIsAnErrorOfAll) {
  ExpectRefused("throwing_predicate_of_rank_1", HasSubstr("no such layer"));
}

TEST(MisuseCreateTest, AnotherDeviceIsNamed) {
  const auto one =
      AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("parameter 'late.apart'"),
            HasSubstr("meta"), HasSubstr("expected cpu"),
            HasSubstr("or name it in sharding.ignored_parameters"));
  ExpectRefused("one_on_meta", one);
  ExpectRefused("one_on_meta_of_rank_1", one);
  ExpectRefused(
      "all_on_meta",
      AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("parameter 'weightless'"),
            HasSubstr("meta"), HasSubstr("no memory")));
}

TEST(MisuseCreateTest, RanksThatDifferAreNamed) {
  for (const char* change :
       {"shape_of_rank_1", "shape_of_rank_1_that_is_to_follow_rank_0",
        "dtype_of_rank_1"}) {
    ExpectRefused(
        change, AllOf(StartsWith("INVALID_ARGUMENT"),
                      HasSubstr("shape or dtype of parameter "
                                "'blocks.1.up.weight'"),
                      HasSubstr("rank 1"), HasSubstr("build the same module")));
  }
  // Each rank says what the parameter is called here.
  const std::vector<std::string> answers =
      RunOnRanks(2, "TryCreate", "order_of_rank_1");
  EXPECT_THAT(answers[0], HasSubstr("the name of parameter 'x' (number 0) "
                                    "differs between rank 0 and rank 1; build "
                                    "the same module on every rank"));
  EXPECT_THAT(answers[1], HasSubstr("the name of parameter 'y'"));
}

TEST(MisuseCreateTest, ClassesAndPatternsThatMatchNothingAreNamed) {
  ExpectRefused("unit_class",
                AllOf(StartsWith("INVALID_ARGUMENT"),
                      HasSubstr("unit_classes: no module is of class "
                                "'MlpBlok'"),
                      HasSubstr("nearest first"), HasSubstr("MlpBlockImpl")));
  ExpectRefused("leaf_class", HasSubstr("no module is of class 'Expert'"));
  ExpectRefused("fp32_class", HasSubstr("no module is of class 'RmsNorm'"));
  ExpectRefused(
      "ignored",
      AllOf(StartsWith("INVALID_ARGUMENT"),
            HasSubstr("sharding.ignored_parameters: 'blocks.7*' is not a "
                      "parameter or module"),
            HasSubstr("such as 'blocks.0'")));
}

TEST(MisuseCreateTest, MemoryThatSufficesForNoStageIsSaid) {
  ExpectRefused("no_memory",
                AllOf(StartsWith("RESOURCE_EXHAUSTED: no stage fits"),
                      HasSubstr("stage 3 "), HasSubstr("use more ranks"),
                      HasSubstr("sharding.memory_limit_bytes")));
}

// ---- aliases and raw pointers of parameters that were converted

TrainingSpec Bf16(int stage) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.dtype = "bf16";
  return spec;
}

class ConvertedTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(All, ConvertedTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// What an alias says that was taken before Create, read and written, a line
// each; it is the parameter's again after Close.
TESSERA_RANK_FUNCTION(ReadOldAlias) {
  auto model = BuildModel("Mlp", world.rank());
  const at::Tensor alias = Some(*model).detach();
  const at::Tensor values = alias.clone();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(model, ConfigOf(TrainingSpec::FromText(args)),
                               world.communicator()));
  const absl::Status read =
      CatchTorch("read", [&] { return alias + 1; }).status();
  const absl::Status write =
      CatchTorch("write", [&] { alias.data_ptr<float>()[0] = 1; });
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  if (!at::equal(alias, values) || !Some(*model).is_alias_of(alias)) {
    return absl::InternalError("the alias is not what it was");
  }
  return absl::StrCat(read.ToString(), "\n", write.ToString());
}

TEST_P(ConvertedTest, AnAliasTakenBeforeCreateIsNamed) {
  for (const std::string& answer :
       RunOnRanks(2, "ReadOldAlias", Bf16(GetParam()).ToText())) {
    const std::vector<std::string> errors = absl::StrSplit(answer, '\n');
    ASSERT_GE(errors.size(), 2u) << answer;
    EXPECT_THAT(std::vector<std::string>({errors[0], errors[1]}),
                Each(AllOf(HasSubstr("parameter 'blocks.1.up.weight' was "
                                     "converted to BFloat16 by Engine::Create"),
                           HasSubstr("take aliases afterwards"))));
  }
}

}  // namespace
}  // namespace tessera
