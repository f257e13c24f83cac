#include "sharding/dispatch/stack_tensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {
namespace {

TEST(ReplaceTensorsTest, ReplacesTensorsAlsoInLists) {
  const at::Tensor old = torch::ones({1}), other = torch::zeros({1});
  torch::jit::Stack stack = {
      old, at::Tensor(), std::vector<at::Tensor>{old, old},
      c10::List<std::optional<at::Tensor>>({std::nullopt, old}), 3};
  std::vector<size_t> asked;
  ReplaceTensors(&stack, stack.size(), [&](const at::Tensor& t, size_t i) {
    EXPECT_TRUE(t.is_same(old));
    asked.push_back(i);
    return i == 2 && asked.size() > 2 ? at::Tensor() : other;
  });
  EXPECT_EQ(asked, (std::vector<size_t>{0, 2, 2, 3}));
  EXPECT_TRUE(stack[0].toTensor().is_same(other));
  EXPECT_FALSE(stack[1].toTensor().defined());
  EXPECT_TRUE(stack[2].toTensorVector()[0].is_same(other));
  EXPECT_TRUE(stack[2].toTensorVector()[1].is_same(old));
  EXPECT_TRUE(stack[3].toListRef()[0].isNone());
  EXPECT_TRUE(stack[3].toListRef()[1].toTensor().is_same(other));
  EXPECT_EQ(stack[4].toInt(), 3);
}

TEST(ReplaceTensorsTest, LeavesListsWithoutTensorsAlone) {
  const c10::IValue numbers = std::vector<int64_t>{1, 2};
  const c10::IValue nothing =
      c10::List<std::optional<at::Tensor>>({std::nullopt, std::nullopt});
  torch::jit::Stack stack = {numbers, nothing};
  ReplaceTensors(&stack, 2, [](const at::Tensor& t, size_t) { return t; });
  EXPECT_TRUE(stack[0].is(numbers));
  EXPECT_TRUE(stack[1].is(nothing));
}

}  // namespace
}  // namespace tessera
