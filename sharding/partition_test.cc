#include "sharding/partition.h"

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kNoLimit = 1'000'000'000;

struct Block : nn::Module {
  Block() {
    register_module("a", nn::Linear(nn::LinearOptions(3, 2).bias(false)));
    register_module("b", nn::Linear(2, 3));
  }
};

struct Outer : nn::Module {
  Outer() {
    register_module("left", std::make_shared<Block>());
    register_module("right", std::make_shared<Block>());
  }
};

// A module made up as it goes along.
struct Free : nn::Module {
  void Add(const std::string& name, at::Tensor tensor) {
    register_parameter(name, std::move(tensor));
  }
  void Add(const std::string& name, std::shared_ptr<nn::Module> module) {
    register_module(name, std::move(module));
  }
};

// "unit: parameter parameter", one for each unit.
std::vector<std::string> Plan(const nn::Module& module,
                              int64_t max_unit_numel = kNoLimit) {
  auto plans = PlanUnits(module, max_unit_numel);
  if (!plans.ok()) return {plans.status().ToString()};
  std::vector<std::string> units;
  for (const UnitPlan& plan : *plans) {
    units.push_back(absl::StrCat(
        plan.name, ": ",
        absl::StrJoin(plan.parameters, " ",
                      [](std::string* out, const NamedParameter& p) {
                        absl::StrAppend(out, p.name);
                      })));
  }
  return units;
}

TEST(PlanUnits, TakesInstancesOfARepeatedTypeAndRunsBetweenThem) {
  Free module;
  module.Add("embedding", torch::zeros({4}));
  module.Add("places", torch::zeros({4}));
  // Own parameters come before those of children, whatever was added first.
  module.Add("block0", std::make_shared<Block>());
  module.Add("norm", nn::LayerNorm(nn::LayerNormOptions({2})).ptr());
  module.Add("block1", std::make_shared<Block>());
  module.Add("head", nn::Linear(2, 2).ptr());
  EXPECT_THAT(Plan(module),
              ElementsAre("embedding: embedding places",
                          "block0: block0.a.weight block0.b.weight "
                          "block0.b.bias",
                          "norm.weight: norm.weight norm.bias",
                          "block1: block1.a.weight block1.b.weight "
                          "block1.b.bias",
                          "head.weight: head.weight head.bias"));
}

TEST(PlanUnits, TakesTheOutermostRepeatedType) {
  Free module;
  module.Add("x", std::make_shared<Outer>());
  module.Add("y", std::make_shared<Outer>());
  EXPECT_THAT(Plan(module), ElementsAre(HasSubstr("x: x.left.a.weight"),
                                        HasSubstr("y: y.left.a.weight")));
}

TEST(PlanUnits, TakesTorchsTypesIfNoOtherIsRepeated) {
  Free module;
  module.Add("first", nn::Linear(3, 3).ptr());
  module.Add("second", nn::Linear(3, 3).ptr());
  module.Add("norm", nn::LayerNorm(nn::LayerNormOptions({3})).ptr());
  EXPECT_THAT(Plan(module), ElementsAre("first: first.weight first.bias",
                                        "second: second.weight second.bias",
                                        "norm.weight: norm.weight norm.bias"));
}

TEST(PlanUnits, MakesOneUnitOfAModuleWithoutRepetition) {
  Free module;
  module.Add("w", torch::zeros({2, 3}));
  module.Add("layer", nn::Linear(3, 3).ptr());
  EXPECT_THAT(Plan(module), ElementsAre("w: w layer.weight layer.bias"));
}

TEST(PlanUnits, CutsLargeUnitsBetweenParameters) {
  Free module;
  for (const char* name : {"a", "b", "c", "d"}) {
    module.Add(name, torch::zeros({10}));
  }
  module.Add("large", torch::zeros({100}));
  module.Add("last", torch::zeros({1}));
  EXPECT_THAT(Plan(module, 20),
              ElementsAre("a: a b", "c: c d", "large: large", "last: last"));
}

TEST(PlanUnits, CutsALargeBlockToo) {
  Free module;
  module.Add("block0", std::make_shared<Block>());
  module.Add("block1", std::make_shared<Block>());
  EXPECT_THAT(Plan(module, 12),
              ElementsAre("block0: block0.a.weight block0.b.weight",
                          "block0.b.bias: block0.b.bias",
                          "block1: block1.a.weight block1.b.weight",
                          "block1.b.bias: block1.b.bias"));
}

TEST(PlanUnits, KeepsOneDtypePerUnit) {
  Free module;
  module.Add("a", torch::zeros({2}));
  module.Add("b", torch::zeros({2}, torch::kDouble));
  module.Add("c", torch::zeros({2}, torch::kDouble));
  module.Add("d", torch::zeros({2}));
  EXPECT_THAT(Plan(module), ElementsAre("a: a", "b: b c", "d: d"));
}

TEST(PlanUnits, NamesATiedParameterOnce) {
  Free module;
  const at::Tensor tied = torch::zeros({2, 2});
  module.Add("head", tied);
  module.Add("between", torch::zeros({3}));
  module.Add("embedding", module.named_parameters()["head"]);
  EXPECT_THAT(Plan(module), ElementsAre("head: head between"));
}

TEST(PlanUnits, KeepsParametersOfOneStorageTogether) {
  const at::Tensor all = torch::zeros({100});
  auto block = [&](int64_t offset) {
    auto module = std::make_shared<Free>();
    module->Add("own", torch::zeros({3}));
    module->Add("shared", all.narrow(0, offset, 10));
    return module;
  };
  Free module;
  module.Add("block0", block(0));
  module.Add("between", nn::Linear(1, 1).ptr());
  module.Add("block1", block(30));
  EXPECT_THAT(Plan(module),
              ElementsAre("block0: block0.own block0.shared block1.shared",
                          "between.weight: between.weight between.bias",
                          "block1: block1.own"));
}

TEST(PlanUnits, LeavesParametersWithoutElementsOutside) {
  Free module;
  module.Add("empty", torch::zeros({0, 3}));
  module.Add("w", torch::zeros({1}));
  EXPECT_THAT(Plan(module), ElementsAre("w: w"));
  Free nothing;
  EXPECT_THAT(Plan(nothing), IsEmpty());
}

TEST(PlanUnits, RefusesAParameterByName) {
  auto refused = [](const char* name, at::Tensor tensor) {
    auto child = std::make_shared<Free>();
    child->Add("good", torch::zeros({2}));
    child->Add(name, std::move(tensor));
    Free module;
    module.Add("child", child);
    return PlanUnits(module, kNoLimit).status();
  };
  auto names = [](const char* name, const char* what) {
    return StatusIs(
        absl::StatusCode::kInvalidArgument,
        AllOf(HasSubstr(absl::StrCat("'child.", name, "'")), HasSubstr(what)));
  };
  EXPECT_THAT(refused("half", torch::zeros({2}, torch::kHalf)),
              names("half", "dtype"));
  EXPECT_THAT(refused("far", torch::zeros({2}, torch::kMeta)),
              names("far", "device meta"));
  EXPECT_THAT(refused("wide", torch::zeros({2, 1}).expand({2, 5})),
              names("wide", "strides"));
  EXPECT_THAT(refused("holes", torch::zeros({4, 4}).narrow(1, 0, 2)),
              names("holes", "strides"));
  EXPECT_THAT(refused("sparse", torch::zeros({2, 2}).to_sparse()),
              names("sparse", "layout"));
}

TEST(PlanUnits, RefusesParametersThatOverlap) {
  const at::Tensor all = torch::zeros({100});
  Free module;
  module.Add("a", all.narrow(0, 0, 10));
  module.Add("b", all.narrow(0, 9, 10));
  EXPECT_THAT(PlanUnits(module, kNoLimit),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'a'"), HasSubstr("'b'"),
                             HasSubstr("overlap"))));
}

}  // namespace
}  // namespace tessera
