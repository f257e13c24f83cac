// What placed tensors refuse, and by what words.

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A view of a tensor that was written through another view has an old history,
// which a function of the user's would go by.
TESSERA_RANK_FUNCTION(ChangedThroughAnotherView) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("reading", [&] {
    const Tensor y =
        net->a->up(at::ones({2, DividedNetImpl::kDim}, at::kDouble));
    const Tensor first = y.select(0, 0);
    y.select(0, 1).mul_(3);
    DoubledByFunction(first).relu();
  });
  return std::string(status.message());
}

TEST(TensorErrors, AFunctionOfTheUsersIsNotCutFromTheGraph) {
  for (auto& answer : RankPool::Get(2)->Run("ChangedThroughAnotherView", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("give it a clone()"));
  }
}

// A view that parts do not have is of a copy, which must not be written.
TESSERA_RANK_FUNCTION(WriteToAViewWithoutARule) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("writing", [&] {
    const Tensor y =
        net->a->up(at::ones({2, DividedNetImpl::kDim}, at::kDouble));
    y.slice(1, 0, 5).mul_(3);
  });
  return std::string(status.message());
}

TEST(TensorErrors, AViewWithoutARuleIsNotWritten) {
  for (auto& answer : RankPool::Get(2)->Run("WriteToAViewWithoutARule", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("aten::mul_ would write to a view"));
  }
}

TESSERA_RANK_FUNCTION(OtherSizesInPlace) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("writing", [&] {
    net->a->up(at::ones({2, DividedNetImpl::kDim}, at::kDouble)).t_();
  });
  return std::string(status.message());
}

TEST(TensorErrors, SizesAreNotChangedInPlace) {
  for (auto& answer : RankPool::Get(2)->Run("OtherSizesInPlace", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("aten::t_ would change the sizes"));
  }
}

TESSERA_RANK_FUNCTION(TargetOutOfRange) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("loss", [&] {
    F::cross_entropy(
        net->head(at::ones({2, DividedNetImpl::kDim}, at::kDouble)),
        at::full({2}, DividedNetImpl::kWords));
  });
  return std::string(status.message());
}

TEST(TensorErrors, TargetsOutOfRangeAreErrors) {
  for (auto& answer : RankPool::Get(2)->Run("TargetOutOfRange", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("a target is not that of a class"));
  }
}

TESSERA_RANK_FUNCTION(PointerOfAPart) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status =
      CatchTorch("reading", [&] { net->head->weight.data_ptr<double>(); });
  return std::string(status.message());
}

TEST(TensorErrors, AreNoMemory) {
  for (auto& answer : RankPool::Get(2)->Run("PointerOfAPart", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer,
                HasSubstr("divided among the ranks, without a pointer"));
  }
}

// What a function of the user's saves is a placed tensor, whose part is
// written.
TESSERA_RANK_FUNCTION(WriteToWhatIsSaved) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const Tensor x = at::ones({2, DividedNetImpl::kDim}, at::kDouble);
  std::string messages;
  const auto add = [&](const auto& write) {
    const Tensor w = net->a->up->weight * 1;
    const Tensor y = ProductByFunction(x, w);
    {
      torch::NoGradGuard no_grad;
      write(w);
    }
    const absl::Status status =
        CatchTorch("backward", [&] { y.sum().backward(); });
    absl::StrAppend(&messages, status.ok() ? "OK" : "error: ", status.message(),
                    "\n");
  };
  add([](const Tensor&) {});
  add([](const Tensor& w) { w.mul_(2); });
  add([](const Tensor& w) { w.cumsum_(1); });  // without a rule
  add([](const Tensor& w) { w.t().select(0, 1).zero_(); });
  return messages;
}

TEST(TensorErrors, WritesToWhatIsSavedAreVersionErrors) {
  for (auto& answer : RankPool::Get(2)->Run("WriteToWhatIsSaved", "")) {
    TESSERA_ASSERT_OK(answer);
    const std::vector<std::string> lines =
        absl::StrSplit(*answer, '\n', absl::SkipEmpty());
    ASSERT_EQ(lines.size(), 4u) << *answer;
    EXPECT_EQ(lines[0], "OK");
    for (size_t i = 1; i < lines.size(); ++i) {
      EXPECT_THAT(lines[i], HasSubstr("modified by an inplace operation"));
    }
  }
}

// An optimizer writes the parameter by its part, or by the placed tensor.
TESSERA_RANK_FUNCTION(StepBeforeBackward) {
  DividedNet net;
  const auto parts =
      DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const Tensor x = at::ones({2, DividedNetImpl::kDim}, at::kDouble);
  const Tensor y = ProductByFunction(x, net->a->up->weight);
  {
    torch::NoGradGuard no_grad;
    parts.at("a.up.weight").mul_(2);
  }
  const absl::Status status =
      CatchTorch("backward", [&] { y.sum().backward(); });
  return std::string(status.message());
}

TEST(TensorErrors, AStepBeforeBackwardIsAVersionError) {
  for (auto& answer : RankPool::Get(2)->Run("StepBeforeBackward", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("modified by an inplace operation"));
  }
}

TESSERA_RANK_FUNCTION(SetDataOfAnotherKind) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const Tensor placed = net->a->up->weight;
  const Tensor whole = at::ones(placed.sizes(), at::kDouble);
  std::string messages;
  const auto add = [&](const Tensor& of, const Tensor& data) {
    const absl::Status status =
        CatchTorch("setting", [&] { of.set_data(data); });
    absl::StrAppend(&messages, status.message(), "\n");
  };
  add(placed, whole);
  add(whole, placed);
  add(placed, net->a->o->weight);
  return messages;
}

TEST(TensorErrors, DataOfAnotherKindAreRefused) {
  for (auto& answer : RankPool::Get(2)->Run("SetDataOfAnotherKind", "")) {
    TESSERA_ASSERT_OK(answer);
    const std::vector<std::string> lines =
        absl::StrSplit(*answer, '\n', absl::SkipEmpty());
    ASSERT_EQ(lines.size(), 3u) << *answer;
    for (const std::string& line : lines) {
      EXPECT_THAT(line, HasSubstr("write the values by copy_()"));
    }
  }
}

// A view of a copy, in a list.
TESSERA_RANK_FUNCTION(WriteToAViewInAList) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("writing", [&] {
    const Tensor y =
        net->a->up(at::ones({2, DividedNetImpl::kDim}, at::kDouble));
    const std::vector<Tensor> both = {y, y.slice(1, 0, 5)};
    at::_foreach_mul_(both, 3);
  });
  return std::string(status.message());
}

TEST(TensorErrors, AViewWithoutARuleIsNotWrittenInAList) {
  for (auto& answer : RankPool::Get(2)->Run("WriteToAViewInAList", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer,
                HasSubstr("aten::_foreach_mul_ would write to a view"));
  }
}

// They gather tensors of one size, in operators that differ.
TESSERA_RANK_FUNCTION(OtherOperators) {
  DividedNet net;
  DivideNet(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("forward", [&] {
    const Tensor y =
        net->a->up(at::ones({2, DividedNetImpl::kDim}, at::kDouble));
    world.rank() == 0 ? y.cumsum(1) : y.flip({1});
  });
  return std::string(status.message());
}

TEST(TensorErrors, RanksInDifferentOperatorsAreTold) {
  for (auto& answer : RankPool::Get(2)->Run("OtherOperators", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, AllOf(HasSubstr("different collectives"),
                               HasSubstr("of aten::cumsum"),
                               HasSubstr("of aten::flip")));
  }
}

}  // namespace
}  // namespace tessera
