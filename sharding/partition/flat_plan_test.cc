#include "sharding/partition/flat_plan.h"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "sharding/partition/free_module_test_util.h"
#include "sharding/partition/partition.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Units are the module's children and the runs between them.
std::vector<UnitPlan> Units(const FreeModule& module) {
  PartitionOptions options;
  options.is_unit = [](const torch::nn::Module&, absl::string_view path) {
    return !path.empty() && !absl::StrContains(path, ".");
  };
  return PlanUnits(module, options).value().units;
}

// What requires a gradient here.
std::vector<bool> Trainable(const std::vector<UnitPlan>& units) {
  std::vector<bool> trainable;
  for (const auto& unit : units) {
    for (const auto& p : unit.parameters) {
      const size_t index = p.index;
      if (trainable.size() <= index) trainable.resize(index + 1);
      trainable[index] = p.tensor.requires_grad();
    }
  }
  return trainable;
}

// "name: parameter parameter", one for each flat.
std::vector<std::string> Lines(const std::vector<FlatPlan>& flats) {
  std::vector<std::string> lines;
  for (const FlatPlan& flat : flats) {
    lines.push_back(absl::StrCat(flat.name, ": ", Names(flat.parameters)));
  }
  return lines;
}

std::vector<std::string> Split(const FreeModule& module,
                               const FlatOptions& options = {}) {
  const std::vector<UnitPlan> units = Units(module);
  auto flats = SplitFlats(units, Trainable(units), options);
  return flats.ok() ? Lines(*flats)
                    : std::vector<std::string>{flats.status().ToString()};
}

FlatOptions Persist(int64_t numel) {
  FlatOptions options;
  options.sharded_parameters = true;
  options.persistence_threshold = numel;
  return options;
}

TEST(SplitFlats, MakesOneFlatOfAHomogeneousUnit) {
  FreeModule module;
  module.Add("a", torch::zeros({1}));
  module.Add("b", torch::zeros({2}));
  module.Add("frozen", torch::nn::Linear(1, 1).ptr());
  for (auto& p : module.children()[0]->parameters()) p.requires_grad_(false);
  const std::vector<UnitPlan> units = Units(module);
  const auto flats = SplitFlats(units, Trainable(units), {}).value();
  EXPECT_THAT(Split(module),
              ElementsAre("a: a b", "frozen: frozen.weight frozen.bias"));
  EXPECT_TRUE(flats[0].trainable);
  EXPECT_FALSE(flats[1].trainable);
  EXPECT_EQ(flats[1].unit, "frozen");
}

TEST(SplitFlats, PartsTrainableAndFrozenParameters) {
  FreeModule module;
  module.Add("a", torch::zeros({1}), false);
  module.Add("b", torch::zeros({1}));
  module.Add("c", torch::zeros({1}), false);
  module.Add("d", torch::zeros({1}));
  EXPECT_THAT(Split(module), ElementsAre("a (frozen): a c", "a: b d"));
  // It is not this rank that says which.
  const std::vector<UnitPlan> units = Units(module);
  const auto flats = SplitFlats(units, {true, true, true, false}, {}).value();
  EXPECT_EQ(Names(flats[0].parameters), "a b c");
  EXPECT_EQ(Names(flats[1].parameters), "d");
}

TEST(SplitFlats, PartsDtypes) {
  FreeModule module;
  module.Add("a", torch::zeros({1}));
  module.Add("b", torch::zeros({1}, torch::kDouble));
  module.Add("c", torch::zeros({1}));
  module.Add("d", torch::zeros({1}, torch::kLong), false);
  module.Add("e", torch::zeros({1}, torch::kDouble), false);
  EXPECT_THAT(Split(module),
              ElementsAre("a: a c", "a (float64): b", "a (frozen) (int64): d",
                          "a (frozen) (float64): e"));
}

TEST(SplitFlats, PartsWorkingDtypesAndOriginalOnes) {
  FreeModule module;
  module.Add("a", torch::zeros({1}));
  module.Add("kept", torch::nn::Linear(1, 1).ptr());
  module.Add("b", torch::zeros({1}, torch::kBFloat16));
  PartitionOptions partition;
  partition.is_unit = [](const auto&, absl::string_view) { return false; };
  partition.fp32_classes = {"Linear"};
  const std::vector<UnitPlan> units =
      PlanUnits(module, partition).value().units;
  FlatOptions options;
  options.working_dtype = [](const NamedParameter& p) {
    return p.keep_fp32 ? at::kFloat : at::kBFloat16;
  };
  const auto flats = SplitFlats(units, Trainable(units), options).value();
  ASSERT_EQ(flats.size(), 3u);
  EXPECT_EQ(flats[0].name, "a");
  EXPECT_EQ(flats[0].dtype, at::kFloat);
  EXPECT_EQ(flats[0].working_dtype, at::kBFloat16);
  EXPECT_EQ(flats[1].name, "a (2)");  // computes with the same
  EXPECT_EQ(flats[1].dtype, at::kBFloat16);
  EXPECT_EQ(flats[1].working_dtype, at::kBFloat16);
  EXPECT_EQ(flats[2].name, "a (float32)");
  EXPECT_EQ(flats[2].dtype, at::kFloat);
  EXPECT_EQ(flats[2].working_dtype, at::kFloat);
}

TEST(SplitFlats, OrdersFlatsByTheirFirstParameters) {
  FreeModule module;
  auto block = std::make_shared<FreeModule>();
  auto nested = std::make_shared<FreeModule>();
  auto tail = std::make_shared<FreeModule>();
  block->Add("a", torch::zeros({1}));
  nested->Add("b", torch::zeros({1}));
  tail->Add("c", torch::zeros({1}), false);
  block->Add("nested", nested);
  block->Add("tail", tail);
  module.Add("block", block);
  PartitionOptions options;
  options.is_unit = [](const auto&, absl::string_view path) {
    return path == "block" || path == "block.nested";
  };
  const auto units = PlanUnits(module, options).value().units;
  const auto flats = SplitFlats(units, Trainable(units), {}).value();
  EXPECT_THAT(Lines(flats),
              ElementsAre("block: block.a", "block.nested: block.nested.b",
                          "block (frozen): block.tail.c"));
  EXPECT_EQ(flats[2].unit, "block");
}

// ---- one storage

TEST(SplitFlats, AStorageIsTrainedIfOneOfItsParametersIs) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", all.narrow(0, 0, 10), false);
  module.Add("b", torch::zeros({1}), false);
  module.Add("c", all.narrow(0, 10, 10), true);
  module.Add("d", all.narrow(0, 20, 10), false);
  EXPECT_THAT(Split(module), ElementsAre("a: a c d", "a (frozen): b"));
}

TEST(SplitFlats, RefusesTwoWorkingDtypesInOneStorage) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", all.narrow(0, 0, 10));
  module.Add("b", all.narrow(0, 10, 10));
  FlatOptions options;
  options.working_dtype = [](const NamedParameter& p) {
    return p.name == "a" ? at::kFloat : at::kHalf;
  };
  const std::vector<UnitPlan> units = Units(module);
  EXPECT_THAT(SplitFlats(units, Trainable(units), options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'a'"), HasSubstr("'b'"),
                             HasSubstr("float32 and float16"))));
}

TEST(SplitFlats, AStorageCountsAsOneForPersistence) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", all.narrow(0, 0, 10));
  module.Add("b", all.narrow(0, 10, 10));
  EXPECT_THAT(Split(module, Persist(19)), ElementsAre("a: a b"));
  EXPECT_THAT(Split(module, Persist(20)), ElementsAre("a (kept whole): a b"));
}

// ---- persistence

FreeModule Blocks(int64_t bias_numel) {
  FreeModule module;
  for (int i = 0; i < 3; ++i) {
    auto block = std::make_shared<FreeModule>();
    block->Add("w", torch::empty({4'000'000}));
    block->Add("b", torch::empty({bias_numel}));
    module.Add(absl::StrCat("block", i), block);
  }
  return module;
}

TEST(SplitFlats, PersistentParametersOfUnitsShareAFlat) {
  EXPECT_THAT(Split(Blocks(10), Persist(10)),
              ElementsAre("block0: block0.w",
                          "block0 and other small parameters (kept whole): "
                          "block0.b block1.b block2.b",
                          "block1: block1.w", "block2: block2.w"));
  const auto units = Units(Blocks(10));
  const auto flats = SplitFlats(units, Trainable(units), Persist(10)).value();
  EXPECT_FALSE(flats[0].persistent);
  EXPECT_TRUE(flats[1].persistent);
}

TEST(SplitFlats, NothingPersistsBelowStage3OrAboveTheThreshold) {
  FlatOptions options = Persist(10);
  options.sharded_parameters = false;
  const auto whole =
      ElementsAre("block0: block0.w block0.b", "block1: block1.w block1.b",
                  "block2: block2.w block2.b");
  EXPECT_THAT(Split(Blocks(10), options), whole);
  EXPECT_THAT(Split(Blocks(10), Persist(9)), whole);
  EXPECT_THAT(Split(Blocks(1), Persist(0)), whole);
}

TEST(SplitFlats, ThePersistentOnesOfAModelAreLimited) {
  FreeModule module;
  module.Add("a", torch::zeros({4}));
  module.Add("b", torch::zeros({4}));
  module.Add("c", torch::zeros({3}));  // still fits when b does not
  module.Add("d", torch::zeros({1}));
  FlatOptions options = Persist(4);
  options.model_persistence_threshold = 7;
  EXPECT_THAT(Split(module, options),
              ElementsAre("a (kept whole): a c", "a: b d"));
}

TEST(SplitFlats, PersistentFlatsHaveALimitAndOneKindEach) {
  const int64_t half = kMaxPersistentFlatNumel / 2;
  FreeModule module;
  module.Add("a", torch::empty({half}));
  module.Add("b", torch::empty({half}));
  module.Add("frozen", torch::empty({1}), false);
  module.Add("c", torch::empty({1}));
  module.Add("d", torch::empty({2 * half + 1}));
  module.Add("wide", torch::empty({1}, torch::kDouble));
  module.Add("e", torch::empty({1}));
  EXPECT_THAT(
      Split(module, Persist(1 << 30)),
      ElementsAre("a (kept whole): a b", "a (frozen) (kept whole): frozen",
                  "a (kept whole) (2): c", "a (kept whole) (3): d",
                  "a (float64) (kept whole): wide", "a (kept whole) (4): e"));
}

}  // namespace
}  // namespace tessera
