// PlanUnits: which parameters it takes, and those that share memory.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "sharding/partition/free_module_test_util.h"
#include "sharding/partition/partition.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

// Matches an InvalidArgument that says all of `what`.
template <typename... Strings>
auto Refused(const Strings&... what) {
  return StatusIs(absl::StatusCode::kInvalidArgument,
                  AllOf(HasSubstr(what)...));
}

// ---- which parameters

absl::Status PlanWith(const char* name, at::Tensor tensor, bool trainable) {
  auto child = std::make_shared<FreeModule>();
  child->Add("good", torch::zeros({2}));
  child->Add(name, std::move(tensor), trainable);
  FreeModule module;
  module.Add("child", child);
  return PlanUnits(module, {}).status();
}

TEST(PlanUnits, TakesFloatingAndComplexDtypesAndAnyThatIsFrozen) {
  for (at::ScalarType dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
        torch::kComplexFloat, torch::kComplexDouble}) {
    EXPECT_TRUE(PlanWith("p", torch::zeros({2}, dtype), true).ok()) << dtype;
  }
  for (at::ScalarType dtype : {torch::kLong, torch::kByte, torch::kBool,
                               torch::kComplexHalf, torch::kFloat8_e4m3fn}) {
    EXPECT_TRUE(PlanWith("p", torch::empty({2}, dtype), false).ok()) << dtype;
  }
}

TEST(PlanUnits, RefusesAParameterByName) {
  auto refused = [](const char* name, at::Tensor tensor) {
    return PlanWith(name, std::move(tensor), true);
  };
  EXPECT_THAT(refused("small", torch::empty({2}, torch::kFloat8_e4m3fn)),
              Refused("'child.small'", "dtype", "requires_grad_(false)"));
  EXPECT_THAT(refused("half", torch::empty({2}, torch::kComplexHalf)),
              Refused("'child.half'", "dtype"));
  EXPECT_THAT(refused("far", torch::zeros({2}, torch::kMeta)),
              Refused("'child.far'", "device meta"));
  EXPECT_THAT(refused("wide", torch::zeros({2, 1}).expand({2, 5})),
              Refused("'child.wide'", "strides"));
  EXPECT_THAT(refused("holes", torch::zeros({4, 4}).narrow(1, 0, 2)),
              Refused("'child.holes'", "strides"));
  EXPECT_THAT(refused("sparse", torch::zeros({2, 2}).to_sparse()),
              Refused("'child.sparse'", "layout"));
  EXPECT_THAT(refused("negative", torch::zeros({2})._neg_view()),
              Refused("'child.negative'", "negative or conjugate bit"));
  EXPECT_THAT(
      refused("conjugate", torch::zeros({2}, torch::kComplexFloat).conj()),
      Refused("'child.conjugate'", "negative or conjugate bit"));
  at::Tensor inference;
  {
    const c10::InferenceMode mode;
    inference = torch::zeros({2});
  }
  EXPECT_THAT(PlanWith("inference", inference, false),
              Refused("'child.inference'", "version counter"));
  FreeModule module;
  module.Add("w", torch::zeros({2}));
  module.Add("derived", torch::zeros({2}), false);
  module.named_parameters()["derived"].add_(module.named_parameters()["w"]);
  EXPECT_THAT(PlanUnits(module, {}), Refused("'derived'", "history"));
}

TEST(PlanUnits, CountsParametersInOrderOfRegistration) {
  FreeModule module;
  auto outer = std::make_shared<FreeModule>();
  auto inner = std::make_shared<FreeModule>();
  auto late = std::make_shared<FreeModule>();
  inner->Add("a", torch::zeros({1}));
  late->Add("b", torch::zeros({1}));
  outer->Add("first", torch::zeros({1}));
  outer->Add("inner", inner);
  outer->Add("late", late);
  module.Add("outer", outer);
  PartitionOptions options;
  options.is_unit = [](const nn::Module&, absl::string_view path) {
    return path == "outer" || path == "outer.inner";
  };
  auto partition = PlanUnits(module, options);
  ASSERT_TRUE(partition.ok()) << partition.status();
  std::vector<std::string> order;
  for (const auto& unit : partition->units) {
    for (const auto& p : unit.parameters) {
      order.push_back(absl::StrCat(p.name, " ", p.index));
    }
  }
  EXPECT_THAT(
      order, ElementsAre("outer.first 0", "outer.late.b 2", "outer.inner.a 1"));
}

// ---- float32

std::string KeptInFp32(const nn::Module& module,
                       const PartitionOptions& options) {
  std::vector<NamedParameter> kept;
  const Partition partition = PlanUnits(module, options).value();
  for (const auto& unit : partition.units) {
    for (const auto& p : unit.parameters) {
      if (p.keep_fp32) kept.push_back(p);
    }
  }
  return Names(kept);
}

// A norm of the user's own.
struct MyNorm : nn::LayerNormImpl {
  MyNorm() : LayerNormImpl(nn::LayerNormOptions({2})) {}
};

TEST(PlanUnits, KeepsNormsInFp32) {
  FreeModule module;
  const auto affine = nn::InstanceNorm1dOptions(2).affine(true);
  module.Add("b1", nn::BatchNorm1d(2).ptr());
  module.Add("b2", nn::BatchNorm2d(2).ptr());
  module.Add("b3", nn::BatchNorm3d(2).ptr());
  module.Add("g", nn::GroupNorm(1, 2).ptr());
  module.Add("i1", nn::InstanceNorm1d(affine).ptr());
  module.Add("i2", nn::InstanceNorm2d(affine).ptr());
  module.Add("i3", nn::InstanceNorm3d(affine).ptr());
  module.Add("mine", std::make_shared<MyNorm>());
  module.Add("linear", nn::Linear(2, 2).ptr());
  PartitionOptions options;
  EXPECT_EQ(KeptInFp32(module, options), "");
  options.keep_norms_fp32 = true;
  EXPECT_EQ(KeptInFp32(module, options),
            "b1.weight b1.bias b2.weight b2.bias b3.weight b3.bias g.weight "
            "g.bias i1.weight i1.bias i2.weight i2.bias i3.weight i3.bias "
            "mine.weight mine.bias");
}

TEST(PlanUnits, KeepsClassesInFp32WithAllThatIsInThem) {
  auto router = nn::Sequential(nn::Linear(1, 1));
  FreeModule module;
  module.Add("linear", nn::Linear(1, 1).ptr());
  module.Add("router", router.ptr());
  module.Add("tied", router->named_parameters()["0.weight"]);
  module.Add("other", torch::zeros({1}));
  PartitionOptions options;
  options.fp32_classes = {"Sequential"};
  // A tied parameter is kept for any of its names.
  EXPECT_EQ(KeptInFp32(module, options), "tied router.0.bias");
}

// ---- shared memory

TEST(PlanUnits, NamesATiedParameterOnce) {
  FreeModule module;
  module.Add("head", torch::zeros({2, 2}));
  module.Add("between", torch::zeros({3}));
  module.Tie("embedding", "head");
  EXPECT_THAT(Plan(module), ElementsAre("head: head between"));
}

TEST(PlanUnits, AModuleRegisteredTwiceIsInTheFirstPlace) {
  auto shared = std::make_shared<FreeModule>();
  shared->Add("w", torch::zeros({1}));
  FreeModule module;
  for (const char* name : {"x", "y"}) {
    module.Add(name, std::make_shared<FreeModule>());
    auto& child = static_cast<FreeModule&>(*module.children().back());
    child.Add("own", torch::zeros({1}));
    child.Add("shared", shared);
  }
  EXPECT_THAT(Plan(module), ElementsAre("x: x.own x.shared.w", "y: y.own"));
}

TEST(PlanUnits, KeepsParametersOfOneStorageTogether) {
  const at::Tensor all = torch::zeros({100});
  auto block = [&](int64_t offset) {
    auto module = std::make_shared<FreeModule>();
    module->Add("own", torch::zeros({3}));
    module->Add("shared", all.narrow(0, offset, 10));
    return module;
  };
  FreeModule module;
  module.Add("block0", block(0));
  module.Add("between", nn::Linear(1, 1).ptr());
  module.Add("block1", block(30));
  EXPECT_THAT(Plan(module),
              ElementsAre("block0: block0.own block0.shared block1.shared",
                          "between.weight: between.weight between.bias",
                          "block1: block1.own"));
}

TEST(PlanUnits, CountsParametersOfOneStorageAsOneForTheLimit) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", torch::zeros({10}));
  module.Add("b", all.narrow(0, 0, 8));
  module.Add("c", all.narrow(0, 8, 8));
  module.Add("d", torch::zeros({4}));
  PartitionOptions options;
  options.max_unit_numel = 20;
  EXPECT_THAT(Plan(module, options), ElementsAre("a: a", "b: b c d"));
}

TEST(PlanUnits, RefusesParametersThatOverlap) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", all.narrow(0, 40, 10));
  module.Add("b", all.narrow(0, 0, 10));
  module.Add("c", all.narrow(0, 30, 10));
  EXPECT_THAT(Plan(module), ElementsAre("a: a b c"));
  module.Add("d", all.narrow(0, 29, 2));
  EXPECT_THAT(PlanUnits(module, {}), Refused("'c' and 'd' overlap"));
}

TEST(PlanUnits, RefusesTwoDtypesInOneStorage) {
  const at::Tensor all = torch::zeros({8});
  FreeModule module;
  module.Add("a", all.narrow(0, 0, 4));
  module.Add("b", all.view(torch::kBFloat16).narrow(0, 8, 8));
  EXPECT_THAT(PlanUnits(module, {}),
              Refused("'a' (float32)", "'b' (bfloat16)", "one storage"));
}

TEST(PlanUnits, IgnoresATiedParameterByAnyOfItsNames) {
  FreeModule module;
  module.Add("head", torch::zeros({2, 2}));
  module.Add("w", torch::zeros({1}));
  module.Tie("embedding", "head");
  PartitionOptions options;
  options.ignored = {"embedding"};
  EXPECT_THAT(Plan(module, options), ElementsAre("w: w"));
}

TEST(PlanUnits, RefusesToIgnorePartOfAStorage) {
  const at::Tensor all = torch::zeros({100});
  FreeModule module;
  module.Add("a", all.narrow(0, 0, 10));
  module.Add("b", all.narrow(0, 10, 10));
  PartitionOptions options;
  options.ignored = {"b"};
  EXPECT_THAT(PlanUnits(module, options), Refused("'a'", "'b'", "one storage"));
  options.ignored = {"?"};
  EXPECT_THAT(Plan(module, options), IsEmpty());
}

TEST(PlanUnits, IgnoredParametersMayBeOfAnyKind) {
  FreeModule module;
  module.Add("sparse", torch::zeros({2, 2}).to_sparse());
  module.Add("w", torch::zeros({1}));
  PartitionOptions options;
  options.ignored = {"sparse"};
  EXPECT_THAT(Plan(module, options), ElementsAre("w: w"));
}

}  // namespace
}  // namespace tessera
