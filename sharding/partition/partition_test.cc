#include "sharding/partition/partition.h"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "sharding/partition/free_module_test_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Inner : FreeModule {
  Inner() { Add("w", torch::zeros({4})); }
};

struct TailImpl : FreeModule {
  TailImpl() { Add("w", torch::zeros({1})); }
};

struct Block : FreeModule {
  Block() {
    Add("p", torch::zeros({2}));
    Add("inner", std::make_shared<Inner>());
    Add("tail", std::make_shared<TailImpl>());
  }
};

struct Model : FreeModule {
  Model() {
    Add("before", torch::zeros({1}));
    Add("x", std::make_shared<Block>());
    Add("y", std::make_shared<Block>());
    Add("after", std::make_shared<TailImpl>());
  }
};

// "unit: parameter parameter", one for each unit.
std::vector<std::string> Plan(const nn::Module& module,
                              const PartitionOptions& options = {}) {
  auto partition = PlanUnits(module, options);
  if (!partition.ok()) return {partition.status().ToString()};
  std::vector<std::string> units;
  for (const UnitPlan& unit : partition->units) {
    units.push_back(absl::StrCat(unit.name, ": ", Names(unit.parameters)));
  }
  return units;
}

PartitionOptions Limit(int64_t max_unit_numel) {
  PartitionOptions options;
  options.max_unit_numel = max_unit_numel;
  return options;
}

// Matches an InvalidArgument that says all of `what`.
template <typename... Strings>
auto Refused(const Strings&... what) {
  return StatusIs(absl::StatusCode::kInvalidArgument,
                  AllOf(HasSubstr(what)...));
}

// ---- automatic choice

TEST(PlanUnits, TakesInstancesOfTheOutermostRepeatedTypeAndRunsBetweenThem) {
  Model model;
  model.Add("y2", std::make_shared<Block>());
  model.Add("head", nn::Linear(1, 1).ptr());
  // Own parameters come before those of children, whatever was added first.
  model.Add("places", torch::zeros({4}));
  EXPECT_THAT(Plan(model),
              ElementsAre("before: before places", "x: x.p x.inner.w x.tail.w",
                          "y: y.p y.inner.w y.tail.w", "after.w: after.w",
                          "y2: y2.p y2.inner.w y2.tail.w",
                          "head.weight: head.weight head.bias"));
}

TEST(PlanUnits, TakesOnlyTheOutermostInstances) {
  auto nested = std::make_shared<Inner>();
  nested->Add("again", std::make_shared<Inner>());
  FreeModule module;
  module.Add("a", nested);
  module.Add("b", std::make_shared<Inner>());
  EXPECT_THAT(Plan(module), ElementsAre("a: a.w a.again.w", "b: b.w"));
}

// A norm of the user's own, before the head and in each block.
TEST(PlanUnits, ATypeWithinAnotherIsNotTheOutermostHoweverDeepThatIs) {
  FreeModule module;
  auto blocks = std::make_shared<FreeModule>();
  blocks->Add("0", std::make_shared<Block>());
  blocks->Add("1", std::make_shared<Block>());
  module.Add("first", std::make_shared<TailImpl>());
  module.Add("blocks", blocks);
  module.Add("last", std::make_shared<TailImpl>());
  EXPECT_THAT(
      Plan(module),
      ElementsAre("first.w: first.w",
                  "blocks.0: blocks.0.p blocks.0.inner.w blocks.0.tail.w",
                  "blocks.1: blocks.1.p blocks.1.inner.w blocks.1.tail.w",
                  "last.w: last.w"));
  // Each within the other: by depth.
  auto tail = std::make_shared<TailImpl>();
  tail->Add("block", std::make_shared<Block>());
  module.Add("more", tail);
  EXPECT_THAT(Plan(module), Contains("more: more.w more.block.p "
                                     "more.block.inner.w more.block.tail.w"));
}

TEST(PlanUnits, TakesTorchsTypesIfNoOtherIsRepeated) {
  FreeModule module;
  module.Add("first", nn::Linear(3, 3).ptr());
  module.Add("second", nn::Linear(3, 3).ptr());
  module.Add("norm", nn::LayerNorm(nn::LayerNormOptions({3})).ptr());
  EXPECT_THAT(Plan(module), ElementsAre("first: first.weight first.bias",
                                        "second: second.weight second.bias",
                                        "norm.weight: norm.weight norm.bias"));
}

TEST(PlanUnits, CountsOnlyInstancesWithParameters) {
  FreeModule module;
  module.Add("act0", std::make_shared<FreeModule>());
  module.Add("act1", std::make_shared<FreeModule>());
  module.Add("inner0", std::make_shared<Inner>());
  module.Add("inner1", std::make_shared<Inner>());
  EXPECT_THAT(Plan(module),
              ElementsAre("inner0: inner0.w", "inner1: inner1.w"));
}

TEST(PlanUnits, MakesOneUnitOfAModuleWithoutRepetition) {
  FreeModule module;
  module.Add("w", torch::zeros({2, 3}));
  module.Add("layer", nn::Linear(3, 3).ptr());
  EXPECT_THAT(Plan(module), ElementsAre("w: w layer.weight layer.bias"));
}

TEST(PlanUnits, PutsAllDtypesOfAModuleIntoOneUnit) {
  FreeModule module;
  module.Add("a", torch::zeros({2}));
  module.Add("b", torch::zeros({2}, torch::kDouble));
  module.Add("c", torch::zeros({2}, torch::kBFloat16));
  module.Add("d", torch::zeros({2}, torch::kLong), /*trainable=*/false);
  EXPECT_THAT(Plan(module), ElementsAre("a: a b c d"));
}

// ---- limit

TEST(PlanUnits, CutsLargeUnitsBetweenParameters) {
  FreeModule module;
  for (const char* name : {"a", "b", "c", "d"}) {
    module.Add(name, torch::zeros({10}));
  }
  module.Add("large", torch::zeros({100}));
  module.Add("last", torch::zeros({1}));
  EXPECT_THAT(Plan(module, Limit(20)),
              ElementsAre("a: a b", "c: c d", "large: large", "last: last"));
}

TEST(PlanUnits, CutsAModulesUnitToo) {
  EXPECT_THAT(Plan(Model(), Limit(6)),
              ElementsAre("before: before", "x: x.p x.inner.w",
                          "x.tail.w: x.tail.w", "y: y.p y.inner.w",
                          "y.tail.w: y.tail.w", "after.w: after.w"));
}

TEST(PlanUnits, NamesUnitsApart) {
  FreeModule module;
  module.Add("x", torch::zeros({1}));  // as a child may be called, too
  module.Add("x", std::make_shared<Inner>());
  module.Add("y", std::make_shared<Inner>());
  EXPECT_THAT(Plan(module), ElementsAre("x: x", "x (2): x.w", "y: y.w"));
}

// ---- classes and predicates

TEST(PlanUnits, TakesClassesByName) {
  for (const char* name : {"Tail", "TailImpl"}) {
    PartitionOptions options;
    options.unit_classes = {name};
    EXPECT_THAT(Plan(Model(), options),
                ElementsAre("before: before x.p x.inner.w", "x.tail: x.tail.w",
                            "y.p: y.p y.inner.w", "y.tail: y.tail.w",
                            "after: after.w"));
  }
}

TEST(PlanUnits, NestedClassesAreUnitsAndTheOuterHoldsTheRest) {
  PartitionOptions options;
  options.unit_classes = {"Block", "Inner"};
  EXPECT_THAT(
      Plan(Model(), options),
      ElementsAre("before: before", "x: x.p x.tail.w", "x.inner: x.inner.w",
                  "y: y.p y.tail.w", "y.inner: y.inner.w", "after.w: after.w"));
  // The rest is cut where it is too large.
  options.max_unit_numel = 2;
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("before: before", "x: x.p", "x.inner: x.inner.w",
                          "x.tail.w: x.tail.w", "y: y.p", "y.inner: y.inner.w",
                          "y.tail.w: y.tail.w", "after.w: after.w"));
}

TEST(PlanUnits, TakesWhatAPredicateSays) {
  PartitionOptions options;
  options.is_unit = [](const nn::Module& module, absl::string_view path) {
    return path == "y.inner" || (path == "x" && module.children().size() == 2);
  };
  EXPECT_THAT(
      Plan(Model(), options),
      ElementsAre("before: before", "x: x.p x.inner.w x.tail.w", "y.p: y.p",
                  "y.inner: y.inner.w", "y.tail.w: y.tail.w after.w"));
  options.unit_classes = {"Inner"};  // these as well
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("before: before", "x: x.p x.tail.w",
                          "x.inner: x.inner.w", "y.p: y.p",
                          "y.inner: y.inner.w", "y.tail.w: y.tail.w after.w"));
}

TEST(PlanUnits, TheRootMayHoldTheRest) {
  PartitionOptions options;
  options.is_unit = [](const nn::Module&, absl::string_view path) {
    return path.empty() || path == "x";
  };
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("before: before y.p y.inner.w y.tail.w after.w",
                          "x: x.p x.inner.w x.tail.w"));
}

TEST(PlanUnits, ALeafIsOneUnitWhateverItsSizeAndItsContents) {
  PartitionOptions options = Limit(2);
  options.unit_classes = {"Inner"};
  options.leaf_classes = {"Block"};
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("before: before", "x: x.p x.inner.w x.tail.w",
                          "y: y.p y.inner.w y.tail.w", "after.w: after.w"));
  options.leaf_classes.clear();
  options.is_leaf = [](const nn::Module&, absl::string_view path) {
    return path == "y" || path == "y.inner";
  };
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("before: before", "x.p: x.p", "x.inner: x.inner.w",
                          "x.tail.w: x.tail.w", "y: y.p y.inner.w y.tail.w",
                          "after.w: after.w"));
}

TEST(PlanUnits, LeavesGoWithTheAutomaticChoice) {
  PartitionOptions options;
  options.leaf_classes = {"Inner"};
  EXPECT_THAT(
      Plan(Model(), options),
      ElementsAre("before: before", "x: x.p x.tail.w", "x.inner: x.inner.w",
                  "y: y.p y.tail.w", "y.inner: y.inner.w", "after.w: after.w"));
  // What is in a leaf does not count as repeated: `inner` is but a run.
  options.leaf_classes = {"Block"};
  FreeModule one;
  one.Add("x", std::make_shared<Block>());
  one.Add("inner", std::make_shared<Inner>());
  EXPECT_THAT(Plan(one, options),
              ElementsAre("x: x.p x.inner.w x.tail.w", "inner.w: inner.w"));
}

TEST(PlanUnits, AClassThatIsNotThereIsAnError) {
  for (auto list :
       {&PartitionOptions::unit_classes, &PartitionOptions::leaf_classes,
        &PartitionOptions::fp32_classes}) {
    PartitionOptions options;
    options.*list = {"Block", "Iner"};
    EXPECT_THAT(
        PlanUnits(Model(), options),
        Refused(
            "_classes: ", "'Iner'",
            absl::StrCat("first: ", c10::demangle(typeid(Inner).name()), ", "),
            "::TailImpl", "::Model"));
  }
}

// ---- what stays outside

TEST(PlanUnits, IgnoredParametersStayOutside) {
  PartitionOptions options;
  options.ignored = {"?.inner", "before", "*tail.w"};
  auto partition = PlanUnits(Model(), options);
  ASSERT_TRUE(partition.ok()) << partition.status();
  EXPECT_EQ(Names(partition->ignored),
            "before x.inner.w x.tail.w y.inner.w y.tail.w");
  EXPECT_THAT(Plan(Model(), options),
              ElementsAre("x: x.p", "y: y.p", "after.w: after.w"));
  EXPECT_EQ(partition->units[2].parameters[0].index, 2);
}

TEST(PlanUnits, AnIgnoredNameThatIsNotThereIsAnError) {
  PartitionOptions options;
  for (const auto& [pattern, nearest] :
       {std::pair("z*", "'x'"), std::pair("x.q", "'x.p'"), std::pair("", "'x'"),
        std::pair("inner", "'x.inner'")}) {
    options.ignored = {"x", "x.p", pattern};
    EXPECT_THAT(
        PlanUnits(Model(), options),
        Refused(absl::StrCat("sharding.ignored_parameters: '", pattern, "'"),
                nearest));
  }
}

TEST(PlanUnits, LeavesParametersWithoutElementsOutside) {
  FreeModule module;
  module.Add("empty", torch::zeros({0, 3}));
  module.Add("w", torch::zeros({1}));
  EXPECT_THAT(Plan(module), ElementsAre("w: w"));
  FreeModule nothing;
  EXPECT_THAT(Plan(nothing), IsEmpty());
}

}  // namespace
}  // namespace tessera
